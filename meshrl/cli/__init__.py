"""The command line: its commands are in modules by subject, and `meshrl --help` lists them.

`main` is the program. Each module of commands adds its own to `app`.
"""

import os
import sys
from collections.abc import Sequence

from meshrl.cli import configurations, launching, memory, planning, recording, results, watching
from meshrl.cli.application import app
from meshrl.cli.terminal import log_to_stderr, show_error
from meshrl.errors import MeshrlError

__all__ = ["app", "configurations", "launching", "main", "memory", "planning", "recording", "results", "watching"]


def main(arguments: Sequence[str] | None = None) -> None:
    """The `meshrl` command. A mistake of the user's is told without a traceback, with exit status 1."""
    log_to_stderr()
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
        show_error(error)
        sys.exit(1)
