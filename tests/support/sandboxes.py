"""What each kind of sandbox has to do, and how a package adds one."""

from pathlib import Path
from typing import Any

import pytest

from meshrl import Sandbox
from meshrl.errors import SandboxError
from meshrl.tasks import Ran


async def keeps_the_contract(sandbox: Sandbox) -> None:
    """Commands, files and limits, in a sandbox that is open, with an empty folder."""
    await sandbox.write("some/where.txt", b"\0\xff\n")
    assert await sandbox.read("some/where.txt") == b"\0\xff\n"
    with pytest.raises(SandboxError, match=r"nowhere of the sandbox cannot be read.*No such file"):
        await sandbox.read("nowhere")
    with pytest.raises(SandboxError, match=r"some of the sandbox cannot be written"):
        await sandbox.write("some", "a folder is there")
    both = await sandbox.exec("cat; echo out; echo wrong >&2; exit 3", stdin=b"in ")
    assert (both.status, both.output, both.left_out) == (3, "in out\nwrong\n", 0)
    assert (await sandbox.exec(["sh", "-c", "kill -9 $$"])).status in (137, -9)
    assert (await sandbox.exec(["no-such-program"])).status == 127
    assert (await sandbox.exec("echo $SECRET")).output == "\n"
    for never in ("true " + "x" * (1 << 17), "echo \0", "echo \ud800", ["true", *["x" * 120_000] * 20]):
        assert (await sandbox.exec(never)).status == 127
    await sandbox.write("-", "a name")
    assert await sandbox.read("-") == b"a name"
    wrong: list[dict[str, Any]] = [
        {"command": ["echo", 1]},
        {"command": []},
        {"command": "true", "seconds": 0.0},
        {"command": "true", "seconds": float("nan")},
        {"command": "true", "stdin": "text"},
        {"command": "true", "output_bytes": -1},
        {"command": "true", "output_bytes": 0.5},
    ]
    for arguments in wrong:
        with pytest.raises((TypeError, ValueError), match=r"command|output_bytes"):
            await sandbox.exec(**arguments)
    piped = await sandbox.exec("(while :; do echo x; done) | head -n 1")
    assert (piped.status, piped.output) == (0, "x\n")
    long = await sandbox.exec("seq 100000", output_bytes=7)
    assert (long.output, long.left_out) == ("100000\n", 588895 - 7)
    none = await sandbox.exec("seq 100000", output_bytes=0)
    assert (none.output, none.left_out) == ("", 588895)
    late = await overdue(sandbox, "echo begun; sleep 600")
    assert (late.status, late.output) == (None, "begun\n")
    flood = await overdue(sandbox, "while :; do echo x; done", output_bytes=6)
    assert (flood.status, flood.output.replace("\n", "")) == (None, "xxx")
    assert flood.left_out > 6
    assert (await sandbox.exec("ls some || cat some/where.txt")).status == 0, "it goes on"


async def overdue(sandbox: Sandbox, command: str, output_bytes: int = 65536) -> Ran:
    """Run a command that never ends. A slow machine gets more time to begin it."""
    for seconds in (0.5, 5.0, 50.0):
        ran = await sandbox.exec(command, seconds=seconds, output_bytes=output_bytes)
        if ran.output:
            break
    return ran


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entries: str) -> None:
    """Install a package that adds kinds of sandboxes."""
    (info := folder / "rented_stub-1.dist-info").mkdir()
    (info / "METADATA").write_text("Name: rented-stub\nVersion: 1\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[meshrl.sandboxes]\n{entries}\n", "utf-8")
    monkeypatch.syspath_prepend(str(folder))
