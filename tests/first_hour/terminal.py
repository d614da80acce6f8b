import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from meshrl import cli


def config_of(run: Path | str) -> dict[str, Any]:
    return tomllib.loads(Path(run, "config.toml").read_text("utf-8"))


class Answer(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def told(self) -> str:
        return " ".join((self.err if self.status else self.out + self.err).split())


COMMAND = (sys.executable, "-c", "from meshrl.cli import main; main()")
"""Of a process of its own; the folder of `meshrl` has to be on its PYTHONPATH."""
FAKES = ("policy.backend=fake", "sampler.backend=fake", "reward.backend=fake")
SMALL = ("task.options.size=600", "task.held_out=16")
"""Of a shipped configuration, whose words take a second to make."""


def type_in(*arguments: str) -> Answer:
    out, err = StringIO(), StringIO()
    status = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main(arguments)
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        finally:
            structlog.reset_defaults()
    return Answer(status, out.getvalue(), err.getvalue())


def done(*arguments: str) -> Answer:
    answer = type_in(*arguments)
    assert answer.status == 0, answer.err
    return answer


def refused(*arguments: str) -> str:
    answer = type_in(*arguments)
    assert (answer.status, "Traceback" in answer.err) == (1, False), answer
    return answer.told
