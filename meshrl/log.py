"""Log lines. structlog is imported with the first line, so ranks that log nothing do not load it."""

import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TextIO, cast

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger, Processor


class _Screen:
    """sys.stderr, which rich replaces while its progress line is live. A pager that was closed does not end a run."""

    def write(self, text: str) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(BrokenPipeError):
            sys.stderr.flush()


SCREEN: Final = cast("TextIO", _Screen())
"""Where lines are written."""
_silent: ContextVar[bool] = ContextVar("silent", default=False)


def info(event: str, **values: object) -> None:
    """Log progress."""
    if not _silent.get():
        _logger().info(event, **values)


@contextmanager
def silenced() -> Generator[None]:
    """Suppress `info` during the block. Warnings are still logged."""
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


def warning(event: str, **values: object) -> None:
    """Log something that the user should look at."""
    _logger().warning(event, **values)


def processors() -> "list[Processor]":
    """The processors for readable lines: in colours on a terminal, with values in the given order."""
    import structlog  # noqa: PLC0415 -- with rich and attrs it is a fifth of what meshrl imports

    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper("%H:%M:%S", utc=False),
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), sort_keys=False, pad_event_to=0),
    ]


def _logger() -> "FilteringBoundLogger":
    """The logger that structlog is configured for, as by the command line. A script without one sees the same lines."""
    import structlog  # noqa: PLC0415 -- as above

    if structlog.is_configured():
        return cast("FilteringBoundLogger", structlog.get_logger())
    plain = structlog.PrintLogger(SCREEN)
    return cast("FilteringBoundLogger", structlog.wrap_logger(plain, processors=processors()))
