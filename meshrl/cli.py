"""The command line: run, check, serve, eval, report, trace, simulate, new, configs."""

import asyncio
import os
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from typing import Annotated, cast

import msgspec
import structlog
import typer
from rich.console import Console
from rich.table import Table

from meshrl.config import as_list, validate
from meshrl.engines.local import RankLoop
from meshrl.errors import ConfigError, DataError, MeshrlError, RankFailed
from meshrl.evaluation import Question, evaluate_run
from meshrl.report import find_run, make_trace, read_run, render
from meshrl.roles import Address
from meshrl.run import (
    Job,
    Run,
    RunConfig,
    about,
    copy_script,
    find_config,
    find_mistakes,
    load_job,
    shipped_configs,
)
from meshrl.run import serve as serve_run

app = typer.Typer(
    help="Reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A TOML file, or the name of a shipped one: see `meshrl configs`.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As in policy.optimizer.lr=1e-4 steps=20")
]


RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run, or its name under runs/.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write; else into the run's folder.")]


@app.command()
def run(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Run a configuration. Its files go to runs/NAME."""
    job = load_job(find_config(config), overrides or [], RunConfig)
    folder = Path(job.run.folder) / job.run.name
    try:
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            runner.run(_run(job))
    except (KeyboardInterrupt, _Terminated) as ending:
        typer.echo(f"Interrupted. What was recorded so far is in {folder}", err=True)
        number = signal.SIGTERM if isinstance(ending, _Terminated) else signal.SIGINT
        raise typer.Exit(128 + number) from None
    _show_summary(folder)


@app.command()
def check(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Find what is wrong with a configuration before any model loads."""
    source = find_config(config)
    job = load_job(source, overrides or [], RunConfig)
    mistakes = find_mistakes(job.config, {name: mesh.ranks for name, mesh in job.run.meshes.items()})
    if mistakes:
        raise ConfigError(as_list([f"{source}: {mistake}" for mistake in mistakes]))
    typer.echo(f"{source}: nothing wrong was found")


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
    except (KeyboardInterrupt, _Terminated):
        typer.echo("The server has ended.", err=True)


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
    _write(out or folder / "eval.json", msgspec.json.encode(found))


@app.command()
def new(
    algorithm: Annotated[str, typer.Argument(metavar="ALGORITHM", help="A shipped algorithm, such as grpo.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the copies go.")],
) -> None:
    """Copy an algorithm and its first configuration into a folder, to change them."""
    for path in copy_script(algorithm, folder):
        typer.echo(f"wrote {path}")
        if path.suffix == ".toml":
            typer.echo(f"run it with: meshrl run {path}")


@app.command()
def configs() -> None:
    """List the shipped configurations."""
    table = Table("name", "what it is", box=None, header_style="bold")
    table.columns[0].no_wrap = True
    for name, path in shipped_configs().items():
        table.add_row(name, about(path))
    Console().print(table)


@app.command()
def report(run: RunArgument, out: Out = None) -> None:
    """Write a page about a run, one HTML file: timeline, what bounded each step, curves, samples."""
    folder = find_run(run)
    _write(out or folder / "report.html", render(read_run(folder)).encode())


@app.command()
def simulate(  # noqa: PLR0913, PLR0917 -- the options of a command
    config: ConfigArgument,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, typer.Option(help="How many steps of the script; else as many as are configured.")
    ] = None,
    recorded: Annotated[
        str | None, typer.Option("--from", metavar="RUN", help="A recorded run, whose calls tell what calls take.")
    ] = None,
    rollout: Annotated[float | None, typer.Option(help="Or a guess: seconds of one rank's rollouts of a step.")] = None,
    train: Annotated[float | None, typer.Option(help="And: seconds of one rank's update on them.")] = None,
    seed: Annotated[int, typer.Option(help="What is drawn of the recorded times.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the simulated run's folder here.")] = None,
) -> None:
    """Say what a configuration's steps would take: its script in virtual time, without models."""
    from meshrl.simulation import simulate_job  # noqa: PLC0415 -- no other command needs the testing kit

    given = [*(overrides or []), *([f"steps={steps}"] if steps is not None else [])]
    job = load_job(find_config(config), given, RunConfig)
    record = find_run(recorded) if recorded else None
    forecast = simulate_job(job, record=record, rollout=rollout, train=train, seed=seed, folder=folder)
    table = Table(box=None, show_header=False)
    for name, value in forecast.lines():
        table.add_row(name, value)
    Console().print(table)
    if json:
        _write(json, msgspec.json.encode(forecast))


@app.command()
def trace(run: RunArgument, out: Out = None) -> None:
    """Write a run's timeline as a trace that ui.perfetto.dev opens."""
    folder = find_run(run)
    record = read_run(folder)
    if not record.events:
        raise DataError(f"{folder}: there is nothing to trace: {' '.join(record.notes) or 'events.jsonl is empty.'}")
    _write(out or folder / "trace.json", msgspec.json.encode(make_trace(record.events)))


def main(arguments: Sequence[str] | None = None) -> None:
    """The `meshrl` command. A mistake of the user's is told without a traceback, with exit status 1."""
    _log_to_stderr()
    # GNU OpenMP's threads spin for milliseconds while they wait for each other. With another program on the same
    # cores that makes steps of milliseconds take seconds; so they spin shortly, which costs nothing alone. It is read
    # when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    if "" not in sys.path:
        # As with `python -m`: a reward function in a package of the current folder can be imported.
        sys.path.append("")
    try:
        app(args=arguments)
    except MeshrlError as error:
        typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
        typer.echo(_told(error), err=True)
        sys.exit(1)


class _Terminated(Exception):
    """SIGTERM ended the run."""


async def _run(job: Job[RunConfig]) -> None:
    with _cancelled_by_sigterm():
        async with Run(job.run, job.resolved) as under_way:
            await job.script.function(under_way, job.config)


async def _serve(folder: Path, address: Address) -> None:
    with _cancelled_by_sigterm():
        await serve_run(folder, address, typer.echo)


@contextmanager
def _cancelled_by_sigterm() -> Generator[None]:
    """SIGTERM cancels the task that the block is in, as Ctrl-C does, and a second one ends the process at once.

    Raises `_Terminated` when the block has ended by that.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or current_thread() is not main_thread():
        yield  # whoever has a handler wants it
        return
    loop, task = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
    came = False

    def cancel(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        loop.call_soon_threadsafe(task.cancel)  # which wakes the loop

    # Not the loop's own handler, with which it would wait on files from here on: see RankLoop.
    signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    except asyncio.CancelledError:
        if came:
            raise _Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _show_summary(folder: Path) -> None:
    summary: object = msgspec.json.decode((folder / "summary.json").read_bytes())
    table = Table(box=None, show_header=False)
    for name, value in cast("dict[str, object]", summary).items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    table.add_row("folder", str(folder))
    Console().print(table)


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {file}")


def _told(error: MeshrlError) -> str:
    """The message; what a rank raised on purpose needs no traceback."""
    if isinstance(error, RankFailed) and isinstance(error.__cause__, MeshrlError):
        return f"{error.__cause__}\n(in {error.actor}.{error.endpoint} on rank {error.rank})"
    return str(error)


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False, pad_event_to=0),
        ],
        # Looked up at each line: while the progress line is live, rich has put itself in its place.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
