"""What the tests of a first hour have in common: a terminal."""

import sys
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
