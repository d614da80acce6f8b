"""The commands that read a run's folder: serve, eval, merge, push, report, compare, trace, audit, diagnose."""

import asyncio
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from meshrl.cli.application import Out, RunArgument, app, write
from meshrl.cli.signals import Terminated, cancelled_by_sigterm
from meshrl.cli.terminal import show_comparison, show_error, show_findings, show_lines
from meshrl.config import validate
from meshrl.engines.local import RankLoop
from meshrl.errors import DataError, MeshrlError
from meshrl.observe import (
    STEPS,
    compare,
    diagnose,
    find_run,
    make_trace,
    read_numbers,
    read_run,
    render,
    render_comparison,
    run_lines,
)
from meshrl.roles import Address
from meshrl.run import audit_run, merge_adapters
from meshrl.run import push as push_run
from meshrl.run import serve as serve_run
from meshrl.run.evaluation import Question, evaluate_run

_BREACHES = 10
"""Violations to show for each guarantee."""


@app.command()
def serve(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", help="Switch to each newer model while the run continues.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for every network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    python: Annotated[
        str | None,
        typer.Option(help="Path of the Python that has the server. Default: this Python, not the run's."),
    ] = None,
) -> None:
    """Serve a run's newest model or checkpoint through an OpenAI-compatible API, until Ctrl-C."""
    folder, address = find_run(run).resolve(), Address(host=host, port=port, python=python, follow=follow)
    try:
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            runner.run(_serve(folder, address))
    except (KeyboardInterrupt, Terminated):
        typer.echo("The server has ended.", err=True)


async def _serve(folder: Path, address: Address) -> None:
    with cancelled_by_sigterm():
        await serve_run(folder, address, typer.echo)


@app.command(name="eval")
def evaluate(  # noqa: PLR0913, PLR0917 -- the options of a command
    run: RunArgument,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK]",
            help="A configuration, or a .jsonl or .parquet file. Default: the prompts that the run held out.",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Completions for each prompt.")] = 8,
    reward: Annotated[str | None, typer.Option(help="A reward function. Default: the run's reward.")] = None,
    threshold: Annotated[float, typer.Option(help="Lowest reward that counts as correct.")] = 1.0,
    rows: Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts. Default: all.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature. Default: the run's.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a completion at most. Default: the run's.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend of the sampler. Default: the run's sampler.backend.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling and for the confidence intervals.")] = 0,
    out: Out = None,
) -> None:
    """Evaluate a run's newest model or checkpoint: pass@k on the prompts that it held out, or on TASK."""
    folder = find_run(run).resolve()
    given: dict[str, object] = {
        "task": task,
        "n": n,
        "reward": reward,
        "threshold": threshold,
        "rows": rows,
        "temperature": temperature,
    }
    given |= {"max_tokens": max_tokens, "backend": backend, "seed": seed}
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        found = runner.run(evaluate_run(folder, validate(Question, given, "command line")))
    title = f"{found.model}: {found.prompts} prompts ({found.task}), {found.n} completions each"
    table = Table(
        "measure", "value", "95 % from", "to", box=None, header_style="bold", title=title, title_justify="left"
    )
    for name, estimate in found.lines():
        table.add_row(name, *(f"{value:.4f}" for value in (estimate.value, estimate.low, estimate.high)))
    Console().print(table)
    content = msgspec.json.encode(found)
    if out is None and (kept := _set_aside(folder / "eval.json", content)):
        typer.echo(f"kept the earlier file as {kept}")
    write(out or folder / "eval.json", content)


def _set_aside(file: Path, content: bytes) -> Path | None:
    """Rename a file with other content to `eval-1.json` and so on, and return the new name."""
    if not file.is_file() or file.read_bytes() == content:
        return None
    names = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in count(1))
    return file.rename(next(name for name in names if not name.exists()))


@app.command()
def merge(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="The folder to write. Default: RUN/merged.")
    ] = None,
) -> None:
    """Merge a run's newest adapters into their model, and write a Hugging Face model folder."""
    folder = find_run(run).resolve()
    target = out or folder / "merged"
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        source = runner.run(merge_adapters(folder, target))
    typer.echo(f"wrote {target}, from {source}")


@app.command()
def push(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository. Created if it does not exist.")],
    public: Annotated[bool, typer.Option("--public", help="Create a public repository. Default: private.")] = False,
) -> None:
    """Upload a run's newest model to the Hugging Face hub, with a model card that says how it was made."""
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        address = runner.run(push_run(find_run(run).resolve(), name, public=public))
    typer.echo(f"wrote {address}")


@app.command()
def report(run: RunArgument, out: Out = None) -> None:
    """Write a report of a run as one HTML file: timeline, bottleneck of each step, curves, samples.

    Also print where the time went.
    """
    folder = find_run(run)
    record = read_run(folder)
    write(out or folder / "report.html", render(record).encode())
    show_lines(run_lines(record))


@app.command(name="compare")
def compare_runs(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Folders of runs, or their names under runs/.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The HTML page to write.")] = Path("compare.html"),
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the comparison as JSON too.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap for the intervals.")] = 0,
) -> None:
    """Compare runs in one page: settings, curves, samples, step times, and whether chance explains a difference."""
    found = compare([read_run(find_run(run)) for run in runs], seed)
    show_comparison(found)
    write(out, render_comparison(found).encode())
    if json:
        write(json, msgspec.json.encode(found))


@app.command()
def trace(run: RunArgument, out: Out = None) -> None:
    """Write a run's timeline as a trace for ui.perfetto.dev."""
    folder = find_run(run)
    record = read_run(folder)
    if not record.events:
        raise DataError(f"{folder}: nothing to trace: {' '.join(record.notes) or 'events.jsonl is empty.'}")
    write(out or folder / "trace.json", msgspec.json.encode(make_trace(record.events)))


@app.command()
def audit(run: RunArgument) -> None:
    """Check a run's guarantees by its files: each prompt delivered once, versions, the staleness bound, steps.

    Exit status: 0 if all hold, 1 if one is broken, 2 if the files cannot tell.
    """
    try:
        found = audit_run(find_run(run))
    except MeshrlError as error:
        show_error(error)
        raise typer.Exit(2) from None
    again = f", resumed from a checkpoint {found.resumed} times" if found.resumed else ""
    typer.echo(f"{found.folder}: {found.steps:,} steps{again}; {found.status}")
    for verdict in found.verdicts:
        typer.echo(f"{'holds ' if verdict.holds else 'BROKEN'}  {verdict.promise}: {verdict.told}")
        for breach in verdict.breaches[:_BREACHES]:
            typer.echo(f"          {breach}")
        if (more := len(verdict.breaches) - _BREACHES) > 0:
            typer.echo(f"          and {more:,} more")
    if not found.holds:
        raise typer.Exit(1)


@app.command(name="diagnose")
def find_signs(run: RunArgument) -> None:
    """Find out why a run does not learn: shows warning signs in its numbers, each with advice.

    Exit status: 0 if there is no sign, 1 if there is one, 2 if there is no run or it has too few steps.
    """
    try:
        record = read_numbers(find_run(run))
    except MeshrlError as error:
        show_error(error)
        raise typer.Exit(2) from None
    if (steps := len(record.metrics)) < STEPS:
        typer.echo(f"{record.folder}: {steps} steps are too few for a diagnosis, which needs {STEPS}", err=True)
        raise typer.Exit(2)
    found = diagnose(record)
    show_findings(found)
    if found:
        raise typer.Exit(1)
    typer.echo(f"{record.folder}: no warning sign in {steps:,} steps")
