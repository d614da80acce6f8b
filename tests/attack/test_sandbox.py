"""A model's code that reaches for its trainer, as root and as a plain user, with namespaces and without."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import meshrl
from meshrl import RewardConfig
from meshrl.errors import ConfigError
from meshrl.tasks import sandbox
from meshrl.tasks.function import FunctionReward
from meshrl.tasks.sandbox import Enforced, Limits, Outcome, run_tests

JUDGES = """
import asyncio, json, os, sys
from meshrl.tasks.sandbox import Limits, enforced, run_tests

async def main(codes):
    codes = {name: code.replace("JUDGE", str(os.getpid())) for name, code in codes.items()}
    print(json.dumps({"namespaces": bool(enforced().prefix), "landlock": enforced().files}))
    for name, code in codes.items():
        seconds = 10 if name == "bounds" else 600  # where nothing bounds it, it fills the disk
        limits = Limits(timeout=seconds, memory_mib=256, processes=8, files_mib=8)
        result = await run_tests(code, ["assert True"], limits)
        print(json.dumps({name: [result.outcome, result.output]}))

asyncio.run(main(json.loads(sys.stdin.read())))
"""
"""Runs each code of its input as a test, and tells the outcome and the output of each."""
PLAIN = ("/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
JOB = """
import sys
frame = sys._getframe()
while "job" not in frame.f_locals:
    frame = frame.f_back
job = frame.f_locals["job"]
"""


def opened(command: Sequence[str], hold: Path) -> list[str]:
    """A command whose user can read Python and meshrl, also where they lie in a folder that is root's alone."""
    needed = [Path(each).resolve() for each in (sys.base_prefix, sys.prefix, Path(meshrl.__file__).parents[1])]
    closed = {
        each: [up for up in (each, *each.parents) if not up.stat().st_mode & stat.S_IXOTH][-1:] for each in needed
    }
    held = {each: hold / str(number) for number, each in enumerate(needed) if closed[each]}
    over = {str(each[0]) for each in closed.values() if each}
    script = [
        *(f"mkdir -p '{at}' && mount --bind '{each}' '{at}'" for each, at in held.items()),
        *(f"mount -t tmpfs -o mode=755 none '{each}'" for each in over),
        *(f"mkdir -p '{each}' && mount --bind '{at}' '{each}'" for each, at in held.items()),
        'exec "$@"',
    ]
    return ["unshare", "--mount", "sh", "-c", " && ".join(script), "sh", *command]


def judged(codes: Mapping[str, str], *, plain: bool, bare: bool, folder: Path, hold: Path) -> dict[str, list[str]]:
    """The outcome and the output of each code, and what holds, by a judge with a secret in its environment."""
    environment = {**os.environ, "TMPDIR": str(folder), "SECRET_OF_MINE": "do-not-tell"}
    hidden = ["PATH="] if bare else []  # where `unshare` is looked for
    judge = ["/usr/bin/env", *hidden, *(PLAIN if plain else ()), sys.executable, "-c", JUDGES]
    command = opened(judge, hold) if plain else judge
    done = subprocess.run(
        command, input=json.dumps(codes), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):  # the log tells what does not hold
            told |= json.loads(line)
    return told


def attacks(mark: str, mine: Path, port: int) -> dict[str, str]:
    """What fails, each for itself; JUDGE is the process that judges."""
    return {
        "environ": "print(open('/proc/JUDGE/environ').read())",
        "memory": "open('/proc/JUDGE/mem', 'r+b').seek(4096)",
        "ptrace": "import ctypes\nassert ctypes.CDLL(None).ptrace(16, JUDGE, 0, 0) == 0",
        "signal": "import os\nos.kill(JUDGE, 0)",
        "limits": "import resource\nresource.prlimit(JUDGE, resource.RLIMIT_NOFILE, (8, 8))",
        "network": f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)",
        "reads": f"print(open({str(mine)!r}).read())",
        "writes": f"open({str(mine)!r}, 'w')",
        "temporary": f"open('/tmp/{mark}', 'w')",
        "bounds": "while True: open(str(__import__('random').random()), 'wb').write(bytes(1 << 19))",
    }


LIES: dict[str, Outcome] = {
    "import os\nfor name in os.listdir('.'): os.remove(name)\nos.mkfifo('result')": "passed",
    "import os, glob\nfor name in ('result', 'result-0'): os.symlink('/dev/zero', name)": "passed",
    f"{JOB}\nimport os\nos.write(job['result'], b'[' * 60_000)\nassert False": "failed",
    f"{JOB}\nimport os\nos.write(job['result'], (job['secret'] + ' 7').encode())\nos._exit(0)": "failed",
    f"{JOB}\nimport os\nwhile True: os.write(job['result'], b'x' * 4096)": "timeout",
    f"{JOB}\nimport os\nos.close(job['result'])": "failed",
}


def harmless(mark: str) -> dict[str, str]:
    wait = f"'-c', 'import time; time.sleep(600)', '{mark}'"
    return {
        "shared": f"open('/dev/shm/{mark}', 'w')",
        "segment": f"import ctypes\nassert ctypes.CDLL(None).shmget({key(mark)}, 1 << 20, 0o1666) >= 0",
        "daemon": f"import subprocess, sys\nsubprocess.Popen([sys.executable, {wait}], start_new_session=True)",
        "folders": "import os\nfor _ in range(1100): os.mkdir('dddd'); os.chdir('dddd')\nos.chmod('.', 0)",
    }


FINE = """
import numpy, subprocess, sys, tempfile
with tempfile.TemporaryFile() as file:
    file.write(b"1")
assert subprocess.check_output([sys.executable, "-c", "print(6 * 7)"]).strip() == b"42"
"""


def key(mark: str) -> int:
    return int(mark[-6:], 16)


def left_behind(mark: str) -> list[str]:
    found = [folder for folder in ("/tmp", "/dev/shm") if Path(folder, mark).exists()]  # noqa: S108
    if f" {key(mark)} " in Path("/proc/sysvipc/shm").read_text():
        found.append("a segment")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found += [process.name] if mark.encode() in (process / "cmdline").read_bytes() else []
    return found


@pytest.mark.process
@pytest.mark.parametrize(
    ("plain", "bare"),
    [
        pytest.param(False, False, id="as-it-is"),
        pytest.param(True, True, id="a-plain-user-without-namespaces"),
        pytest.param(False, True, id="without-namespaces", marks=pytest.mark.wide),
        pytest.param(True, False, id="a-plain-user", marks=pytest.mark.wide),
    ],
)
def test_code_reaches_nothing_of_its_trainer(plain: bool, bare: bool, tmp_path: Path) -> None:
    if plain and os.getuid():
        pytest.skip("only root can become another user")
    mark, folder = f"meshrl-{secrets.token_hex(6)}", Path(tempfile.mkdtemp(prefix="meshrl-judge-"))
    mine = folder / "precious"
    mine.write_text("mine")
    if plain:
        for path in (folder, mine):
            os.chown(path, 65534, 65534)
    with socket.create_server(("127.0.0.1", 0)) as server:
        codes = {**attacks(mark, mine, server.getsockname()[1]), **harmless(mark), "fine": FINE}
        if bare:
            del codes["bounds"]  # only the timeout would end it
        told = judged(codes, plain=plain, bare=bare, folder=folder, hold=tmp_path)
    landlock, namespaces = told.pop("landlock"), told.pop("namespaces")
    assert not (bare and namespaces)
    assert told["fine"][0] == "passed", told["fine"]
    expected = set(attacks(mark, mine, 0))
    expected -= set() if landlock else {"reads", "writes", "temporary"}
    expected -= set() if namespaces else {"bounds"}
    assert {name: told[name][0] for name in expected} == dict.fromkeys(expected, "failed"), told
    assert "do-not-tell" not in str(told)
    assert mine.read_text() == "mine"
    mine.unlink()
    folder.rmdir()  # of the sandboxes nothing is left
    assert not left_behind(mark)


async def test_the_judge_is_neither_held_up_nor_believes_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="meshrl-judge-"))  # of this test alone, whoever the sandboxes run as
    folder.chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for code, outcome in LIES.items():
        limits = Limits(timeout=3 if outcome == "timeout" else 600, memory_mib=256)
        result = await run_tests(code, ["assert True"], limits)
        assert result.outcome == outcome, (code, result)
    folder.rmdir()  # of the sandboxes nothing is left


def test_where_nothing_holds_it_is_refused_but_for_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "enforced", Enforced)
    with pytest.raises(ConfigError, match=r"code_tests runs what a model wrote, .* or set reward\.unsafe = true"):
        FunctionReward(RewardConfig(function="code_tests"))
    with pytest.raises(ConfigError, match="code_tests"):
        FunctionReward(RewardConfig(functions={"code": "code_tests", "other": "exact_match"}))
    FunctionReward(RewardConfig(function="code_tests", unsafe=True))
    FunctionReward(RewardConfig())


@pytest.mark.process
async def test_without_namespaces_it_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    add = "def add(a, b): return a + b"
    slow = "import os, time\nif os.fork() == 0: os.setsid()\ntime.sleep(6000)"
    for holds in (Enforced(), Enforced(files=True), Enforced(calls=True)):
        monkeypatch.setattr(sandbox, "enforced", lambda holds=holds: holds)
        done = await asyncio.gather(
            run_tests(add, ["assert add(1, 2) == 3"], Limits(timeout=600)),
            run_tests(slow, ["pass"], Limits(timeout=0.5)),
        )
        assert [each.outcome for each in done] == ["passed", "timeout"], (holds, done)
