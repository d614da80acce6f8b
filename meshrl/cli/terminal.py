"""What a terminal is told: log lines and errors."""

import sys

import structlog
import typer

from meshrl.errors import MeshrlError, RankFailed
from meshrl.log import processors


def show_error(error: MeshrlError) -> None:
    """Tell a mistake of the user's, without a traceback."""
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(_told(error), err=True)


def _told(error: MeshrlError) -> str:
    """The message; what a rank raised on purpose needs no traceback."""
    if isinstance(error, RankFailed) and isinstance(error.__cause__, MeshrlError):
        return f"{error.__cause__}\n(in {error.actor}.{error.endpoint} on rank {error.rank})"
    return str(error)


def log_to_stderr() -> None:
    """Send log lines to where errors go, in colours where a person reads them."""
    structlog.configure(
        processors=processors(),
        # Looked up at each line: while the progress line is live, rich has put itself in its place.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
