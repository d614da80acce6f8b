"""The command line application: arguments that several commands share, their output, and how they run."""

import asyncio
import signal
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from threading import current_thread, main_thread
from typing import Annotated, Final, TypeVar, cast

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshrl.engines.local import RankLoop
from meshrl.errors import ConfigError, MeshrlError, RankFailed
from meshrl.observe import Finding

T = TypeVar("T")

app: typer.Typer = typer.Typer(
    help="Reinforcement learning of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A TOML file, or the name of a shipped configuration (see `meshrl configs`)."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Keys to override, such as policy.optimizer.lr=1e-4 steps=20. ~KEY removes a key or a table.",
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.")]
RolloutSeconds = Annotated[
    float | None, typer.Option(help="Without --from: seconds that one rank takes for a step's rollouts.")
]
TrainSeconds = Annotated[
    float | None, typer.Option(help="Without --from: seconds that one rank takes to update on them.")
]
DurationSeed = Annotated[int, typer.Option(help="Seed for the choice of recorded durations.")]
Host = Annotated[
    str, typer.Option(help="Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for every network.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="The file to write. Default: a file in the run's folder.")
]
JsonOut = Annotated[Path | None, typer.Option(help="Write the numbers to this file.")]

WITH_SETTINGS: Final = {"ignore_unknown_options": True}
"""For commands that take KEY=VALUE: an unknown option reaches `settings`, which explains the mistake."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshrl {version('meshrl')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def settings(config: str, overrides: list[str] | None) -> list[str]:
    """Return the overrides. ConfigError if a key is written as an option (`--steps 3`) or apart from its value."""
    given = [config, *(overrides or [])]
    for at, argument in enumerate(given):
        following = given[at + 1] if at + 1 < len(given) else "--"
        if argument.startswith("-"):
            key, equals, value = argument.lstrip("-").partition("=")
            value = value if equals else "true" if following.startswith("-") else following
            raise ConfigError(f"{argument}: keys are set without dashes. Write {key.replace('-', '_')}={value}")
        if (
            at
            and "=" not in argument + following
            and not argument.startswith("~")
            and not following.startswith(("-", "~"))
        ):
            raise ConfigError(
                f"{argument} {following}: a key and its value are one argument. Write {argument}={following}"
            )
    return given[1:]


def write(file: Path, content: bytes) -> None:
    """Write a file that the user asked for, and say so. ConfigError if it cannot be written."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {file}")


def write_json(file: Path | None, value: object) -> None:
    """Write a value as JSON if the user asked for it."""
    if file:
        write(file, msgspec.json.encode(value))


def show_error(error: MeshrlError) -> None:
    """Show an error that the user can fix, without a traceback. One raised by a rank is shown by its own message."""
    message, cause = str(error), error.__cause__
    if isinstance(error, RankFailed) and isinstance(cause, MeshrlError):
        message = f"{cause}\n(in {error.actor}.{error.endpoint} on rank {error.rank})"
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo("\n".join((message, *getattr(error, "__notes__", ()))), err=True)


def show_findings(findings: Sequence[Finding]) -> None:
    """Show the findings of a diagnosis: evidence, advice, and the page that explains them."""
    for finding in findings:
        typer.secho(f"{finding.name}: ", fg="yellow", bold=True, nl=False)
        typer.echo(f"{finding.evidence}\n  try: {finding.advice}\n  see: {finding.page}")


def show_lines(lines: Sequence[tuple[str, str]]) -> None:
    """Show names with values, such as those of a report or a forecast."""
    if not lines:
        return
    table = Table(box=None, show_header=False)
    for name, value in lines:
        table.add_row(escape(name), escape(value))
    Console().print(table)


def run_async(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine to its end on an event loop that can have ranks."""
    with asyncio.Runner(loop_factory=RankLoop) as runner:
        return runner.run(main)


class Terminated(Exception):
    """SIGTERM ended the run."""


@contextmanager
def cancelled_by_sigterm() -> Generator[None]:
    """Make SIGTERM cancel the task that runs the block, as Ctrl-C does. A second SIGTERM ends the process at once.

    Raises `Terminated` if SIGTERM ended the block.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or current_thread() is not main_thread():
        yield  # keep an installed handler
        return
    loop, task = asyncio.get_running_loop(), cast("asyncio.Task[None]", asyncio.current_task())
    terminated = False

    def cancel(*_: object) -> None:
        nonlocal terminated
        terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        loop.call_soon_threadsafe(task.cancel)  # this wakes the loop

    # Not loop.add_signal_handler, after which the loop would wait on files: see RankLoop.
    signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    except asyncio.CancelledError:
        if terminated:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
