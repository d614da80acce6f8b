"""What a user's code raises that no error should be, and a disk that is full at the end of a run."""

import asyncio
import gc
import re
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl import Actor, LocalEngine, Mesh, Metrics, Resources, Run, RunConfig, endpoint
from meshrl.data import Batch
from meshrl.errors import DataError, RankFailed
from meshrl.tasks import RewardConfig
from meshrl.tasks.function import FunctionReward
from meshrl.testing import FakeRun


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def silent(prompt: str, completion: str, row: dict[str, object]) -> float:
    raise Silent("x")


def half(prompt: str, completion: str, row: dict[str, object]) -> float:
    raise ValueError("half of a pair: \ud800")


def gives_up(prompt: str, completion: str, row: dict[str, object]) -> float:
    raise asyncio.CancelledError("of its own")


async def gives_up_later(prompt: str, completion: str, row: dict[str, object]) -> float:
    await asyncio.sleep(0)
    raise asyncio.CancelledError("of its own")


SAYS = {
    "silent": "Silent: (its text cannot be made: str() raised RuntimeError)",
    "half": "ValueError: half of a pair: \\ud800",
    "gives_up": "CancelledError: of its own",
    "gives_up_later": "CancelledError: of its own",
}


async def test_what_a_reward_raises_is_of_its_row(tmp_path: Path) -> None:
    batch = Batch.of(prompt=["a", "b"], completion=["c", "d"])
    for name, seconds in ((name, seconds) for name in SAYS for seconds in (None, 600.0)):
        config = RewardConfig(function=f"{__file__}:{name}", row_timeout=seconds)
        with capture_logs() as logs:
            async with Run(RunConfig(folder=str(tmp_path), name=f"{name}-{seconds}", samples_every=1)) as run:
                reward = await (await run.mesh(1)).spawn(FunctionReward, config)
                scored = await reward.score(batch)
                with pytest.raises(
                    DataError, match=f"raised on each of the 2 rows of a step, .*{re.escape(SAYS[name])}"
                ):
                    await run.record(Metrics.of(loss=(1.0, 1.0)), scored)
                judged = scored.assign(reward_error=[None, None])
                await run.record(Metrics.of(loss=(1.0, 1.0)), Batch.concat([scored, judged]))
        assert scored.rewards.tolist() == [0.0, 0.0]
        assert scored.objects("reward_error") == (SAYS[name],) * 2
        told = [each for each in logs if each["log_level"] == "warning"]
        assert [each["error"] for each in told] == [SAYS[name]], name
        assert "test_small_errors.py, line " in told[0]["at"]
        sample = msgspec.json.decode((run.folder / "samples.jsonl").read_bytes().splitlines()[0])
        assert sample["reward_error"] == SAYS[name]


class Raises(Actor):
    @endpoint
    async def work(self) -> None:
        raise Silent

    @endpoint
    async def cancel(self) -> None:
        raise asyncio.CancelledError("of its own")


async def test_what_an_endpoint_raises_is_told_by_its_rank() -> None:
    engine = LocalEngine()
    actor = await (await Mesh.reserve(engine, 1, Resources(cpus=0))).spawn(Raises)
    with pytest.raises(RankFailed, match=r"Raises\.work on rank 0 .*Silent"):
        await actor.work()
    with pytest.raises(RankFailed, match=r"Raises\.cancel on rank 0 .*CancelledError: of its own"):
        await actor.cancel()
    await engine.close()


async def test_a_script_whose_error_has_no_text_leaves_a_summary(tmp_path: Path) -> None:
    with pytest.raises(Silent):
        async with Run(RunConfig(folder=str(tmp_path))):
            raise Silent
    summary = msgspec.json.decode((tmp_path / "run/summary.json").read_bytes())
    assert (summary["status"], summary["error"]) == ("failed", SAYS["silent"])


FULL = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
from meshrl import Metrics, Run, RunConfig

async def main():
    async with Run(RunConfig(folder=sys.argv[1])) as run:
        async for step in run.steps(3):
            if step == 1:
                with suppress(OSError), Path(sys.argv[1], "other").open("wb", buffering=0) as other:
                    while other.write(b"x" * 1000):
                        pass
            await run.record(Metrics.of(loss=(1.0, 1.0)), **{f"number_{n}": 1.0 for n in range(1000)})

asyncio.run(main())
"""
MOUNTS = 'mount -t tmpfs -o size=1m none "$1" && "$2" -c "$3" "$1" > /dev/null; cat "$1/run/summary.json"'


def test_a_disk_that_is_full_at_the_end_has_the_summary(tmp_path: Path) -> None:
    alone = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    command = [*alone, "sh", "-c", MOUNTS, "sh", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "No space left on device" in done.stderr
    summary = msgspec.json.decode(done.stdout)
    assert (summary["status"], summary["steps"]) == ("failed", 1)


def test_the_folder_of_a_fake_run_is_nobody_elses() -> None:
    one, other = FakeRun(), FakeRun()
    folder = one.folder
    assert folder == one.folder != other.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.iterdir())
    del one
    gc.collect()
    assert not folder.exists()
