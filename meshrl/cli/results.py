"""The commands about a run's folder: serve, eval, merge, push, report, compare, trace, audit, diagnose."""

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
from meshrl.cli.terminal import show_comparison, show_error, show_findings
from meshrl.config import validate
from meshrl.engines.local import RankLoop
from meshrl.errors import DataError, MeshrlError
from meshrl.evaluation import Question, evaluate_run
from meshrl.report import (
    STEPS,
    compare,
    diagnose,
    find_run,
    make_trace,
    read_numbers,
    read_run,
    render,
    render_comparison,
)
from meshrl.roles import Address
from meshrl.run import audit_run, merge_adapters
from meshrl.run import push as push_run
from meshrl.run import serve as serve_run

_BREACHES = 10
"""Of a promise, as many are shown."""


@app.command()
def serve(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", help="Take each newer model of a run that goes on.")] = False,
    host: Annotated[
        str, typer.Option(help="Who may ask: this machine, or with 0.0.0.0 all that reach it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    python: Annotated[
        str | None,
        typer.Option(help="The interpreter that has the server; else this one. The run's own is not taken."),
    ] = None,
) -> None:
    """Serve a run's newest model or checkpoint, as OpenAI's servers do, until Ctrl-C."""
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
        str | None, typer.Argument(metavar="[TASK]", help="A configuration, or a .jsonl or .parquet file.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Completions a prompt.")] = 8,
    reward: Annotated[str | None, typer.Option(help="A reward function; else the run's reward.")] = None,
    at_least: Annotated[float, typer.Option(help="The reward from which on a completion is right.")] = 1.0,
    rows: Annotated[int | None, typer.Option(min=1, help="The first so many prompts; else all.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Else the run's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Else the run's.")] = None,
    backend: Annotated[str | None, typer.Option(help="What samples; else the run's sampler.backend.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn, and of the intervals.")] = 0,
    out: Out = None,
) -> None:
    """Judge a run's newest model or checkpoint: pass@k on the prompts it held out, or on TASK."""
    folder = find_run(run).resolve()
    given: dict[str, object] = {
        "task": task,
        "n": n,
        "reward": reward,
        "at_least": at_least,
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
        typer.echo(f"kept the earlier one as {kept}")
    write(out or folder / "eval.json", content)


def _set_aside(file: Path, content: bytes) -> Path | None:
    """The new name, `eval-1.json` and so on, of a file that says something else."""
    if not file.is_file() or file.read_bytes() == content:
        return None
    names = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in count(1))
    return file.rename(next(name for name in names if not name.exists()))


@app.command()
def merge(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where to write; else RUN/merged.")
    ] = None,
) -> None:
    """Write a run's newest adapters, merged into their model, as a model folder of Hugging Face."""
    folder = find_run(run).resolve()
    target = out or folder / "merged"
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        source = runner.run(merge_adapters(folder, target))
    typer.echo(f"wrote {target}, of {source}")


@app.command()
def push(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository; made where there is none.")],
    public: Annotated[bool, typer.Option("--public", help="Make it for everybody; else it is private.")] = False,
) -> None:
    """Put a run's newest model onto the Hugging Face hub, with a card that says what made it."""
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        address = runner.run(push_run(find_run(run).resolve(), name, public=public))
    typer.echo(f"wrote {address}")


@app.command()
def report(run: RunArgument, out: Out = None) -> None:
    """Write a page about a run, one HTML file: timeline, what bounded each step, curves, samples."""
    folder = find_run(run)
    write(out or folder / "report.html", render(read_run(folder)).encode())


@app.command(name="compare")
def compare_runs(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Folders of runs, or names under runs/.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the page goes.")] = Path("compare.html"),
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="The same for a program.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is resampled for the intervals.")] = 0,
) -> None:
    """Write a page that compares runs: settings, curves, samples, step times, and whether chance explains it."""
    found = compare([read_run(find_run(run)) for run in runs], seed)
    show_comparison(found)
    write(out, render_comparison(found).encode())
    if json:
        write(json, msgspec.json.encode(found))


@app.command()
def trace(run: RunArgument, out: Out = None) -> None:
    """Write a run's timeline as a trace that ui.perfetto.dev opens."""
    folder = find_run(run)
    record = read_run(folder)
    if not record.events:
        raise DataError(f"{folder}: there is nothing to trace: {' '.join(record.notes) or 'events.jsonl is empty.'}")
    write(out or folder / "trace.json", msgspec.json.encode(make_trace(record.events)))


@app.command()
def audit(run: RunArgument) -> None:
    """Say whether a run kept its promises, by its files: each prompt once, versions, the bound, steps.

    Exit status 0 where it did, 1 where it did not, 2 where the files cannot say.
    """
    try:
        found = audit_run(find_run(run))
    except MeshrlError as error:
        show_error(error)
        raise typer.Exit(2) from None
    again = f", which went on from a checkpoint {found.resumed} times" if found.resumed else ""
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
    """Look for why a run does not learn: signs in its numbers, each with what to try.

    Exit status 0 where there is none, 1 where there is one, 2 where there is no run, or too few steps of it to say.
    """
    try:
        record = read_numbers(find_run(run))
    except MeshrlError as error:
        show_error(error)
        raise typer.Exit(2) from None
    if (steps := len(record.metrics)) < STEPS:
        typer.echo(f"{record.folder}: {steps} steps, and {STEPS} are needed to say anything", err=True)
        raise typer.Exit(2)
    found = diagnose(record)
    show_findings(found)
    if found:
        raise typer.Exit(1)
    typer.echo(f"{record.folder}: nothing wrong is seen in {steps:,} steps")
