"""A plugin of pytest: `pytest -p tests.support.counted` notes what each test starts, as properties of a junit file.

`python tests/profile.py` prints them.
"""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

_FOLDER = Path(__file__).with_name("counting")


class _Counted:
    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="counted-")
        os.close(descriptor)
        self._notes = Path(name)
        self._read = 0
        os.environ["COUNTED_TESTS"] = name
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_FOLDER), os.environ.get("PYTHONPATH", "")]))
        sys.path.insert(0, str(_FOLDER))  # it stays: an engine's template gets the path of its controller
        sys.modules.pop("sitecustomize", None)
        __import__("sitecustomize")  # for this process too

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        """Give a test what was noted since the one before it ended, its share of the set-up included."""
        yield
        notes = self._notes.read_bytes()[self._read :]
        self._read += len(notes)
        item.user_properties += Counter(notes.decode().split()).items()

    def pytest_unconfigure(self) -> None:
        """Leave nothing."""
        self._notes.unlink(missing_ok=True)


def pytest_configure(config: pytest.Config) -> None:
    """Count in the processes that run tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(_Counted())
