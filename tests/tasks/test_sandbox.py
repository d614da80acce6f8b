"""The sandbox: what code may do to itself, and what it may not do to us."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from meshrl import Batch, RewardConfig
from meshrl.tasks import sandbox
from meshrl.tasks.function import FunctionReward
from meshrl.tasks.sandbox import Limits, code_of, enforced, run_tests

pytestmark = pytest.mark.process

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
LONG = Limits(timeout=300.0, memory_mib=128, processes=8, output_bytes=4096)
SHORT = LONG.model_copy(update={"timeout": 0.5})


def zombie() -> object:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None  # there is no child at all


async def test_code_that_passes_fails_and_raises() -> None:
    assert (await run_tests(ADD, TESTS)).outcome == "passed"
    assert (await run_tests("import importlib", ["importlib.util.find_spec('json')"])).outcome == "passed"
    wrong = await run_tests(ADD.replace("+", "-"), TESTS)
    assert wrong.outcome == "failed"
    assert "AssertionError" in wrong.output
    assert "SyntaxError" in (await run_tests("def add(", TESTS)).output
    assert "NameError" in (await run_tests("", TESTS)).output


async def test_ending_early_is_no_success() -> None:
    tricks = [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import glob, os\nfor name in ['result', *glob.glob('*')]: open(name, 'w').write('[1, 2]')\nos._exit(0)",
        "print('passed'); import os; os.closerange(0, 100)",
    ]
    done = await asyncio.gather(*(run_tests(trick, ["assert False"], LONG) for trick in tricks))
    assert {trick: each.outcome for trick, each in zip(tricks, done, strict=True)} == dict.fromkeys(tricks, "failed")


async def test_time_memory_files_and_output_are_bounded() -> None:
    for code, limits, outcome in (
        ("import time; time.sleep(600)", SHORT, "timeout"),
        ("while True: pass", SHORT, "timeout"),
        ("x = bytearray(1 << 30)", LONG, "memory"),
        ("x = [0]\nwhile True: x = x + x", LONG, "memory"),
        ("open('big', 'wb').write(bytes(1 << 20))", LONG, "failed"),
    ):
        assert (await run_tests(code, ["pass"], limits)).outcome == outcome, code
    flood = await run_tests("while True: print('x' * 1000)", ["pass"], LONG)
    assert (flood.outcome, len(flood.output)) == ("failed", 4096)


async def test_the_environment_is_empty_and_the_folder_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    code = """
import os, sys
found = [name for name in os.environ if name == "SECRET_OF_MINE"] + os.listdir() + sys.stdin.readlines()
open("a", "w").write("b")
print(os.getcwd())
"""
    done = await run_tests(code, ["assert found == []", "assert open('a').read() == 'b'"])
    assert done.outcome == "passed", done.output
    assert not Path(done.output.strip()).exists()


async def test_processes_are_bounded_and_waited_for() -> None:
    if not enforced().processes:
        pytest.skip("no namespaces on this machine")
    code = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        count += 1
except OSError:
    pass
"""
    done = await run_tests(code, ["assert 1 <= count <= 8, count"], LONG)
    assert done.outcome == "passed", done.output
    bomb = await run_tests("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ["pass"], SHORT)
    assert bomb.outcome == "timeout"
    assert zombie() is None


def test_code_of() -> None:
    codes = {
        "I think:\n```python\nx = 1\n```\nand\n```python\nx = 2\n```": "x = 1\n",
        "```\nx = 1\n```": "x = 1\n",
        "```py\nx = 1": "x = 1",
        "x = 1": "x = 1",
    }
    assert {completion: code_of(completion) for completion in codes} == codes


async def test_as_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "Limits", lambda: LONG)  # on a busy machine a process may be long in starting
    reward = FunctionReward(RewardConfig(function="code_tests"))
    rows: list[object] = [{"tests": TESTS}, {"tests": TESTS[0]}, {"tests": []}]
    completions = [f"```python\n{ADD}```", "def add(a, b): return 0", ADD]
    scored = await reward.score(Batch.of(prompt=["add"] * 3, completion=completions, row=rows))
    np.testing.assert_array_equal(scored.rewards, np.array([1, 0, np.nan], np.float32), strict=True)
    assert scored.objects("reward_error")[:2] == (None, None)
