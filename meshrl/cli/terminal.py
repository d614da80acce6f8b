"""Log lines and errors, as the terminal shows them."""

import traceback
from collections.abc import Sequence
from pathlib import Path

import structlog
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from meshrl.errors import MeshrlError, RankFailed, described
from meshrl.log import SCREEN, processors
from meshrl.observe import Comparison, Finding
from meshrl.user_code import frames_of, is_of_meshrl


def show_error(error: MeshrlError) -> None:
    """Show an error that the user can fix, without a traceback."""
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(_told(error), err=True)


def show_raised(error: Exception, script: Path) -> None:
    """Show an error of a user's script by the script's own lines, unless meshrl's lines are needed to understand it.

    A `MeshrlError` gets a note with the script's line, for `show_error`. Any other error ends the program here.
    """
    frames = frames_of(error, script)
    if not frames:
        return
    if isinstance(error, MeshrlError):
        error.add_note(f"({frames[-1].filename}, line {frames[-1].lineno})")
    elif not is_of_meshrl(error):
        lines = "".join(traceback.format_list(frames))
        typer.echo(f"Traceback (lines of the script only):\n{lines}{described(error)}", err=True)
        raise typer.Exit(1) from None


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


def show_comparison(found: Comparison) -> None:
    """Show how the settings and results of groups of runs differ."""
    groups = (Column(escape(name), overflow="fold") for name in found.groups)
    table = Table(Column(no_wrap=True), *groups, box=None, header_style="bold")
    for key, values in found.settings.items():
        table.add_row(key, *(escape(value) if value is not None else "-" for value in values))
    for measure in found.measures:
        table.add_row(measure.name, *(f"{value:.4g}" if value is not None else "-" for value in measure.values))
    Console().print(table)
    for told in (*found.sentences, *found.notes):
        typer.echo(told)


def _told(error: MeshrlError) -> str:
    """Return the message. A `MeshrlError` that a rank raised needs no traceback."""
    notes = getattr(error, "__notes__", ())
    if isinstance(error, RankFailed) and isinstance(error.__cause__, MeshrlError):
        return "\n".join((f"{error.__cause__}\n(in {error.actor}.{error.endpoint} on rank {error.rank})", *notes))
    return "\n".join((str(error), *notes))


def log_to_stderr() -> None:
    """Send log lines to stderr, in colours if it is a terminal."""
    structlog.configure(
        processors=processors(),
        logger_factory=lambda *_: structlog.PrintLogger(SCREEN),
    )
