"""The commands that read a run's folder: eval, merge, push, report, compare, trace, audit, diagnose, watch."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from meshrl.cli.application import (
    WITH_SETTINGS,
    Out,
    Overrides,
    RunArgument,
    Terminated,
    app,
    cancelled_by_sigterm,
    run_async,
    settings,
    show_error,
    show_findings,
    show_lines,
    write,
    write_json,
)
from meshrl.config import validate
from meshrl.errors import ConfigError, DataError, MeshrlError
from meshrl.observe import (
    STEPS,
    Comparison,
    compare,
    diagnose,
    find_run,
    make_trace,
    read_numbers,
    read_run,
    render,
    render_comparison,
    run_lines,
    run_to_watch,
)
from meshrl.run import (
    EvalOptions,
    Evaluation,
    SessionAudit,
    Verdict,
    audit_run,
    audit_session,
    evaluate_run,
    evaluate_task,
    is_session,
    merge_adapters,
)
from meshrl.run import push as push_run

_BREACHES = 10
"""Violations to show for each guarantee."""


@app.command(name="eval", context_settings=WITH_SETTINGS)
def evaluate(  # noqa: PLR0913, PLR0917 -- the options of a command
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/. With --model: the task.")
    ],
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK]",
            help="A configuration, a .jsonl or .parquet file, or a task by name, such as gsm8k. Default: the prompts "
            "that the run held out.",
        ),
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Evaluate this model, a folder or ORG/NAME, on the task in place of RUN.")
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", min=0, help="Sampled completions for each prompt. Default: 8; with --model 0.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="A reward function. Default: the run's, or that of the task by name.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Lowest reward that counts as correct.")] = 1.0,
    rows: Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts. Default: all.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature. Default: the run's, or 1.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a completion at most. Default: the run's, or the task's.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend of the sampler. Default: the run's sampler.backend, or torch.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling and for the confidence intervals.")] = 0,
    out: Out = None,
) -> None:
    """Evaluate a run's newest model or checkpoint, or a model by name: on held-out prompts, or on TASK."""
    given: dict[str, object] = {"reward": reward, "threshold": threshold, "rows": rows, "temperature": temperature}
    given |= {"max_tokens": max_tokens, "backend": backend, "seed": seed}
    if model is None:
        if overrides or (task and "=" in task and not Path(task).exists()):
            raise ConfigError("KEY=VALUE goes with --model: the settings of a run are those of its configuration")
        folder = find_run(run).resolve()
        given |= {"task": task, "n": 8 if n is None else n}
        evaluation = run_async(evaluate_run(folder, validate(EvalOptions, given, "command line")))
    else:
        options = validate(EvalOptions, given | {"task": run, "n": n or 0}, "command line")
        keys = settings(run, [*([task] if task else []), *(overrides or [])])
        evaluation, folder = run_async(evaluate_task(model, options, keys))
    _show_evaluation(evaluation)
    content = msgspec.json.encode(evaluation)
    if out is None and (earlier := _keep_older_result(folder / "eval.json", content)):
        typer.echo(f"kept the earlier file as {earlier}")
    write(out or folder / "eval.json", content)
    if model is not None:
        typer.echo(f"read its completions with: meshrl watch {folder}")


def _show_evaluation(evaluation: Evaluation) -> None:
    drawn = f"{evaluation.n} completions each" if evaluation.n else "greedy"
    title = f"{evaluation.model}: {evaluation.prompts} prompts ({evaluation.task}), {drawn}"
    table = Table(
        "measure", "value", "95 % from", "to", box=None, header_style="bold", title=title, title_justify="left"
    )
    for name, estimate in evaluation.lines():
        table.add_row(name, *(f"{value:.4f}" for value in (estimate.value, estimate.low, estimate.high)))
    Console().print(table)
    if evaluation.truncated:
        typer.echo(f"completions cut off at the token limit: {evaluation.truncated:.0%} (--max-tokens raises it)")
    if evaluation.reward_errors:
        typer.echo(f"completions without a verdict: {evaluation.reward_errors}")


def _keep_older_result(file: Path, content: bytes) -> Path | None:
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
    source = run_async(merge_adapters(folder, target))
    typer.echo(f"wrote {target}, from {source}")


@app.command()
def push(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository. Created if it does not exist.")],
    public: Annotated[bool, typer.Option("--public", help="Create a public repository. Default: private.")] = False,
) -> None:
    """Upload a run's newest model to the Hugging Face hub, with a model card that says how it was made."""
    typer.echo(f"wrote {run_async(push_run(find_run(run).resolve(), name, public=public))}")


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
    comparison = compare([read_run(find_run(run)) for run in runs], seed)
    _show_comparison(comparison)
    write(out, render_comparison(comparison).encode())
    write_json(json, comparison)


def _show_comparison(comparison: Comparison) -> None:
    groups = (Column(escape(name), overflow="fold") for name in comparison.groups)
    table = Table(Column(no_wrap=True), *groups, box=None, header_style="bold")
    for key, values in comparison.settings.items():
        table.add_row(key, *(escape(value) if value is not None else "-" for value in values))
    for measure in comparison.measures:
        table.add_row(measure.name, *(f"{value:.4g}" if value is not None else "-" for value in measure.values))
    Console().print(table)
    for sentence in (*comparison.sentences, *comparison.notes):
        typer.echo(sentence)


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

    Of a server's run: each request applied once and in order, and no step without gradients.

    Exit status: 0 if all hold, 1 if one is broken, 2 if the files cannot tell.
    """
    try:
        folder = find_run(run)
        if is_session(folder):
            _show_session(audit_session(folder))
            return
        result = audit_run(folder)
    except MeshrlError as error:
        show_error(error)
        raise typer.Exit(2) from None
    again = f", resumed from a checkpoint {result.resumed} times" if result.resumed else ""
    typer.echo(f"{result.folder}: {result.steps:,} steps{again}; {result.status}")
    _show_verdicts(result.verdicts)


def _show_session(result: SessionAudit) -> None:
    typer.echo(f"{result.folder}: {result.requests:,} requests; {result.status}")
    _show_verdicts(result.verdicts)


def _show_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Show verdicts, and exit with 1 if one is broken."""
    for verdict in verdicts:
        typer.echo(f"{'holds ' if verdict.holds else 'BROKEN'}  {verdict.promise}: {verdict.numbers}")
        for breach in verdict.breaches[:_BREACHES]:
            typer.echo(f"          {breach}")
        if (more := len(verdict.breaches) - _BREACHES) > 0:
            typer.echo(f"          and {more:,} more")
    if not all(verdict.holds for verdict in verdicts):
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
    findings = diagnose(record)
    show_findings(findings)
    if findings:
        raise typer.Exit(1)
    typer.echo(f"{record.folder}: no warning sign in {steps:,} steps")


@app.command()
def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's folder, or its name under runs/. It need not exist yet. Default: the newest run.",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on. Default: 6007, or a free one.")
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Print a token that lets the page pause, checkpoint and stop the run.")
    ] = False,
) -> None:
    """Show a run's live report in a browser, on this machine only, until Ctrl-C."""
    folder, message = run_to_watch(run)
    if message:
        typer.echo(message, err=True)
    with suppress(KeyboardInterrupt, Terminated):
        asyncio.run(_watch(folder, port, control))


async def _watch(folder: Path, port: int | None, control: bool) -> None:
    from meshrl.observe import Watcher  # noqa: PLC0415 -- it needs packages of an extra

    with cancelled_by_sigterm():
        watcher = Watcher(folder, control=control)
        async with watcher.serving(port):
            typer.echo(f"{folder}: {watcher.address}")
            await asyncio.Event().wait()
