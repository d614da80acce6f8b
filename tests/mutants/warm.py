"""Runs tests in children of a process that has imported the large packages: `python -P warm.py NEWS`, in a tree.

It imports nothing of meshrl and its tests, so each child finds the product as the tree has it then. Each line of its
input has the last arguments of `run` in JSON, and it answers with the line of an `Outcome`.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

import pytest

_LARGE: Final = ("hypothesis", "torch.distributed.tensor", "transformers", "peft", "accelerate", "pydantic", "httpx")
Outcome = dict[Literal["failed", "passed", "lines"], Any]
"""What failed, the seconds of each test that passed, and by file and line the tests that ran it."""


class Watch:
    """A plugin that tells how tests end. With `stops` the first failure ends the process."""

    def __init__(self, tell: Callable[..., None], coverage: Any, *, stops: bool) -> None:
        self._tell, self._coverage, self._stops = tell, coverage, stops
        self._passed, self._began = "", 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._tell("began", item.nodeid)
        self._began = time.monotonic()
        if self._coverage:  # what runs from here on is this test's
            self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)
            if self._stops:
                os._exit(0)
        elif report.when == "call" and report.passed:
            self._passed = report.nodeid
        elif report.when == "teardown" and self._passed == report.nodeid:
            self._tell("passed", report.nodeid, time.monotonic() - self._began)


def child(options: Sequence[str], lines: Sequence[str], news: Path) -> None:
    """Run tests, and write news of them."""
    os.setsid()
    os.dup2(2, 1)
    written = news.open("a", buffering=1)

    def tell(*told: object) -> None:
        print(json.dumps(told), file=written)

    coverage = None
    if lines:
        coverage = import_module("coverage").Coverage(data_file=None, config_file=False, include=lines)
        coverage.start()
    if int(pytest.main([*options], plugins=[Watch(tell, coverage, stops="-x" in options)])) not in (0, 1, 5):
        tell("failed", "the import of the tests")
    if coverage:
        coverage.stop()
        data = coverage.get_data()
        for file in data.measured_files():
            found = {line: [test for test in tests if test] for line, tests in data.contexts_by_lineno(file).items()}
            tell("lines", os.path.relpath(file), found)


def run(news: Path, options: Sequence[str], lines: Sequence[str], silence: float) -> Outcome:
    """Run tests with pytest's `options`. One that takes longer than `silence`, or ends the process, has failed.

    `lines`: patterns of files whose lines are recorded.
    """
    news.write_text("")
    if not (pid := os.fork()):
        try:
            child(options, lines, news)
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    while not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
        if time.time() - news.stat().st_mtime > silence:
            break
        time.sleep(0.02)
    while own := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for each in map(int, own):  # as one ends, its children become this process's
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(each, signal.SIGKILL)
                os.waitpid(each, 0)
    told = [json.loads(line) for line in news.read_text().splitlines()]
    failed = [name for kind, name, *_ in told if kind == "failed"]
    if not ended or ended.si_status:
        now = next((name for kind, name, *_ in reversed(told) if kind == "began"), "the first test")
        failed.append(f"{'the end of the process' if ended else 'the time limit'}, in {now}")
    passed, ran = ({name: more[0] for each, name, *more in told if each == kind} for kind in ("passed", "lines"))
    return {"failed": failed, "passed": {name: passed[name] for name in passed.keys() - failed}, "lines": ran}


def main() -> None:
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    for name in _LARGE:
        import_module(name)
    for line in sys.stdin:
        print(json.dumps(run(Path(sys.argv[1]), *json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
