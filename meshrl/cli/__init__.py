"""The command line. `meshrl --help` lists its commands.

`main` is the program. Each module adds its commands to `app`, in the order of the imports below.
"""

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import structlog

from meshrl.cli import configurations, launching, model_servers, results, tinker_server
from meshrl.cli.application import app, show_error
from meshrl.errors import MeshrlError, shortened
from meshrl.log import SCREEN, processors

__all__ = ["app", "configurations", "launching", "main", "model_servers", "results", "tinker_server"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `meshrl` command. A `MeshrlError` is shown without a traceback, with exit status 1."""
    structlog.configure(processors=processors(), logger_factory=lambda *_: structlog.PrintLogger(SCREEN))
    # GNU OpenMP's threads spin for milliseconds while they wait for each other. If another program uses the same
    # cores, steps of milliseconds then take seconds. A short spin avoids this and costs nothing otherwise. torch
    # reads the variable when it is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    if "" not in sys.path:
        # As with `python -m`, so that a reward function in the current folder can be imported.
        sys.path.append("")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale may lack characters of rows
    is_utf8 = sys.getfilesystemencoding() == "utf-8"
    try:
        for argument in () if is_utf8 else arguments or sys.argv[1:]:
            argument.encode()  # bytes that were no text raise
        app(args=arguments)
    except MeshrlError as error:
        show_error(error)
        sys.exit(1)
    except UnicodeEncodeError as error:
        if is_utf8:
            raise
        encoding = sys.getfilesystemencoding()
        what = f"{shortened(error.object)} does not fit {encoding}, the encoding of this locale"
        show_error(MeshrlError(f"{what}: set LC_ALL=C.UTF-8, or PYTHONUTF8=1"))
        sys.exit(1)
