import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from meshrl import Actor, Batch, Gather, Mesh, Run, RunConfig, endpoint
from meshrl.engines.local import LocalEngine
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import CallTimeout
from meshrl.mesh import Resources, Same, limited
from meshrl.roles import Policy, PolicyConfig
from meshrl.run.config import MeshConfig
from meshrl.testing import FakePolicy, Lognormal, delayed, simulate


class Slow(Actor):
    def __init__(self) -> None:
        self.free = asyncio.Event()

    @endpoint
    async def pid(self) -> Same[int]:
        return os.getpid()

    @endpoint
    async def wait(self) -> None:
        await self.free.wait()

    @endpoint
    async def let_go(self) -> None:
        self.free.set()

    @endpoint
    async def count(self) -> AsyncIterator[Gather[Batch]]:
        yield Batch.of(row=[1])
        await self.free.wait()
        yield Batch.of(row=[2])


def config(folder: Path, slow_after: float = 60) -> RunConfig:
    meshes = {"main": MeshConfig(cpus=0)}
    return RunConfig(name="mine", folder=str(folder), slow_after=slow_after, meshes=meshes)


async def test_a_call_that_takes_long_is_told_of_with_endpoint_rank_and_process(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with Run(config(tmp_path, slow_after=0.05)) as run:
            slow = await (await run.mesh(2)).spawn(Slow)
            stream = slow.count()
            assert len(await anext(stream)) == 1
            logs.clear()
            call = asyncio.create_task(slow.wait())
            told: list[str] = []
            while not told:
                await asyncio.sleep(0.01)
                told = [line["event"] for line in logs if "Slow.wait on rank 0" in line["event"]]
            assert re.search(rf"process {os.getpid()} on .*rank 1 \(.*s$", told[0])
            await slow.let_go()
            await call
    assert not [line for line in logs if "Slow.count" in line["event"]], "whose reader has not asked for more"


def test_a_call_beyond_the_timeout_is_an_error_that_names_its_rank() -> None:
    async def script() -> None:
        engine = LocalEngine()
        slow = limited(await (await Mesh.reserve(engine, 2, Resources(cpus=0))).spawn(Slow), 0.05)
        with pytest.raises(CallTimeout, match=r"within timeout = 0.05 s: rank 0 \(process \d+ on"):
            await slow.wait()
        stream = slow.count()
        for _ in range(2):
            assert len(await anext(stream)) == 1
        with pytest.raises(CallTimeout, match=r"Slow.count has not answered"):
            await anext(stream)
        await slow.let_go()
        assert [len(batch) async for batch in slow.count()] == [1, 1, 1, 1]
        await slow.wait()
        await engine.close()

    simulate(script)


async def test_a_role_has_the_timeout_of_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.testing.FakePolicy", delayed(FakePolicy, save=Lognormal(1000, 0)))
    async with Run(config(tmp_path)) as run:
        policy = await run.spawn(Policy, PolicyConfig(backend="fake", model="none", timeout=0.05))
        with pytest.raises(CallTimeout, match=r"\.save has not answered"):
            await policy.save(str(tmp_path))


SCRIPT = """
import time
from pathlib import Path
from meshrl import AlgorithmConfig, Batch, Reward, RewardConfig, Run

def hangs(prompt, completion, row):
    Path("BEGAN").touch()
    time.sleep(1000)

class MineConfig(AlgorithmConfig):
    reward: RewardConfig

async def mine(run: Run, config: MineConfig) -> None:
    reward = await run.spawn(Reward, config.reward)
    await reward.score(Batch.of(prompt=["a"], completion=["b"]))
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.wide)])
def test_one_interrupt_ends_a_run_whose_reward_hangs(tmp_path: Path, engine: str) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.replace("BEGAN", str(tmp_path / "began")))
    run = f'run = {{ name = "mine", engine = "{engine}" }}\n'
    (tmp_path / "mine.toml").write_text(f'algorithm = "mine.py"\n{run}reward.function = "mine.py:hangs"\n')
    # Whoever runs the tests in the background may have them ignore interrupts, and their children too.
    code = "import signal; signal.signal(2, signal.default_int_handler); from meshrl.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "mine.toml", f"run.folder={tmp_path}"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while not (tmp_path / "began").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        output = process.communicate()[0]
    assert process.returncode == 128 + signal.SIGINT, output
    assert "Interrupted" in output
    assert '"interrupted"' in (tmp_path / "mine/summary.json").read_text()
    psutil.wait_procs(children)


@pytest.mark.process
async def test_a_process_that_is_stopped_is_an_error_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshrl.engines.remote.engine.GRACE", 0.1)
    engine = ProcessEngine()
    slow = await (await Mesh.reserve(engine, 1, Resources(cpus=0))).spawn(Slow)
    pid = await slow.pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(CallTimeout, match=rf"within timeout = 1 s: rank 0 \(process {pid} on"):
            await limited(slow, 1.0).pid()
        await engine.close()
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
