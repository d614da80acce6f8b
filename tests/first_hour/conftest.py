"""What the tests of a first hour have in common: a terminal."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog

from meshrl import cli


class Answer(NamedTuple):
    """What a terminal shows of a command."""

    status: int
    out: str
    err: str


@pytest.fixture
def terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Type `meshrl ARGUMENTS` in a folder of one's own, `tmp_path`, or where one has gone since."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str) -> Answer:
        capsys.readouterr()
        try:
            cli.main(arguments)
            status = 0
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        finally:
            structlog.reset_defaults()
        out, err = capsys.readouterr()
        return Answer(status, out, err)

    return command


@pytest.fixture
def chat_model() -> Callable[..., Path]:
    """Make the folder of a tiny model that chats, as it is downloaded: bfloat16."""
    from tests.first_hour.chat_model import save_model  # noqa: PLC0415 -- most tests need no torch

    return save_model
