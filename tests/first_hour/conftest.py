"""What the tests of a first hour have in common: a terminal."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.first_hour.terminal import Terminal, type_in


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Type `meshrl ARGUMENTS` in a folder of one's own, `tmp_path`, or where one has gone since."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    return type_in


@pytest.fixture
def chat_model() -> Callable[..., Path]:
    """Make the folder of a tiny model that chats, as it is downloaded: bfloat16."""
    from tests.first_hour.chat_model import save_model  # noqa: PLC0415 -- most tests need no torch

    return save_model
