import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

import meshrl as rl
from meshrl.errors import DataError
from meshrl.events import Step
from meshrl.observe.run_files import read_events
from meshrl.run import MeshConfig
from meshrl.testing import FakePolicy

FAKE = rl.PolicyConfig(backend="fake", model="none")
TASK = rl.Task(train=rl.Batch.of(prompt=list("abcdefgh"), answer=list("12345678")), held_out=rl.Batch.of(prompt=[]))
Script = Callable[[rl.Run], Coroutine[None, None, None]]


class Killed(BaseException):
    """Ends a run where it stands."""


def config(folder: Path, **changes: object) -> rl.RunConfig:
    table = {"name": "mine", "folder": str(folder), "checkpoint_every": 2, "resume": True, **changes}
    return rl.RunConfig(**table, meshes={"main": MeshConfig(cpus=0)})  # type: ignore[arg-type]


async def run(script: Script, folder: Path, **changes: object) -> Path:
    with capture_logs(), suppress(Killed):
        async with rl.Run(config(folder, **changes)) as under_way:
            await script(under_way)
    return folder / str(changes.get("name", "mine"))


async def teach(policy: rl.Policy, batch: rl.Batch) -> None:
    await policy.update(await policy.encode(batch.assign(completion=batch["answer"])), rl.CrossEntropy())


def counting(steps: int, dies_in: int = -1, seen: list[int] | None = None, model: rl.PolicyConfig = FAKE) -> Script:
    async def script(run: rl.Run) -> None:
        policy = await run.spawn(rl.Policy, model)
        rows = TASK.batches(2, run.seed)
        async for step in run.steps(steps):
            batch = next(rows)
            await teach(policy, batch)
            if seen is not None:
                seen.append(step)
            first = float(batch.groups[0])
            await run.record(rl.Metrics.of(group=(first, 1.0)), batch, reward=step / 10)
            if step == dies_in:
                raise Killed

    return script


def lines(file: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


async def test_a_checkpoint_is_written_every_so_many_steps_and_the_newest_stay(tmp_path: Path) -> None:
    folder = await run(counting(9), tmp_path)
    assert names(folder) == ["step-000008", "step-000009"], "one after the last"
    assert names(await run(counting(9), tmp_path, name="one", checkpoints_kept=1)) == ["step-000009"]
    assert names(await run(counting(8), tmp_path, name="even")) == ["step-000006", "step-000008"]
    never = await run(counting(9), tmp_path, name="never", checkpoint_every=None)
    assert not (never / "checkpoints").exists()


async def test_a_run_goes_on_after_its_checkpoint_in_the_same_files(tmp_path: Path) -> None:
    seen: list[int] = []
    folder = await run(counting(9, dies_in=6, seen=seen), tmp_path, samples_every=3)
    assert seen == list(range(7))
    seen.clear()
    assert await run(counting(9, seen=seen), tmp_path, samples_every=3) == folder
    assert seen == [6, 7, 8]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    steps = lines(folder / "metrics.jsonl")
    assert [(line["step"], line["group"]) for line in steps] == [(step, 2.0 * step) for step in range(9)]
    assert sorted(line["seconds"] for line in steps) == [line["seconds"] for line in steps]
    assert [line["step"] for line in lines(folder / "samples.jsonl")] == [0, 0, 3, 3, 6, 6, 8, 8]
    summary = msgspec.json.decode((folder / "summary.json").read_bytes())
    assert (summary["status"], summary["steps"], summary["first_reward"]) == ("finished", 9, 0.0)
    assert summary["wall_s"] >= round(steps[-1]["seconds"], 3)
    events = {path.name: read_events(path, []) for path in folder.glob("events*.jsonl")}
    assert {name: [event.step for event in found if isinstance(event, Step)] for name, found in events.items()} == {
        "events-1.jsonl": list(range(7)),
        "events.jsonl": [6, 7, 8],
    }
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    tensorboard = accumulator(str(folder))
    with capture_logs():
        tensorboard.Reload()
    assert [(event.step, event.value) for event in tensorboard.Scalars("group")] == [(n, 2.0 * n) for n in range(9)]


async def test_a_crash_loop_before_the_first_checkpoint_keeps_one_folder(tmp_path: Path) -> None:
    for steps in (3, 2, 1):
        seen: list[int] = []
        folder = await run(counting(9, dies_in=steps - 1, seen=seen), tmp_path, checkpoint_every=100)
        assert seen == list(range(steps))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [0]
    assert not list(folder.glob("events-*.jsonl"))
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    for _ in range(2):  # one that has finished is no part of the loop
        await run(counting(3), tmp_path, checkpoint_every=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-1"]
    assert len(lines(tmp_path / "mine-1/metrics.jsonl")) == 3


async def test_what_is_half_written_or_half_removed_is_cleaned_up_and_never_read(tmp_path: Path) -> None:
    folder = await run(counting(9, dies_in=4), tmp_path)
    for left in (".step-000006-1234", ".step-000002-gone"):
        (folder / "checkpoints" / left / "0-policy").mkdir(parents=True)
    seen: list[int] = []
    await run(counting(5, seen=seen), tmp_path)
    assert seen == [4]
    assert names(folder) == ["step-000004", "step-000005"]


class Failing(FakePolicy):
    """Its second checkpoint fails, at once or when it is waited for, after something was written."""

    later = False
    made = 0

    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        await super().checkpoint(folder, wait, adapter)
        Failing.made += 1
        if not self.later:
            await self.written()

    async def written(self) -> None:
        if Failing.made == 2:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("later", "meanwhile"), [(False, True), (False, False), (True, True)])
async def test_a_checkpoint_that_is_not_written_is_told_and_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool, meanwhile: bool
) -> None:
    monkeypatch.setattr("meshrl.testing.FakePolicy", Failing)
    monkeypatch.setattr(Failing, "later", later)
    monkeypatch.setattr(Failing, "made", 0)
    with pytest.raises(Exception, match="No space left on device"):
        await run(counting(9), tmp_path, checkpoint_async=meanwhile)
    assert names(tmp_path / "mine") == ["step-000002"]
    seen: list[int] = []
    await run(counting(9, seen=seen), tmp_path)
    assert seen == list(range(2, 9))


async def test_what_is_measured_once_is_in_the_checkpoint(tmp_path: Path) -> None:
    measured: list[str] = []

    async def measure(name: str) -> dict[str, float]:
        measured.append(name)
        return {"greedy": 0.1 + 0.2, "sampled": math.nan}

    for dies_in in (4, -1):

        async def script(run: rl.Run, dies_in: int = dies_in) -> None:
            before = await run.once("before", lambda: measure("before"))
            assert before["greedy"] == 0.1 + 0.2
            assert math.isnan(before["sampled"])
            await counting(9, dies_in)(run)
            await run.once("after", lambda: measure("after"))

        await run(script, tmp_path)
    assert measured == ["before", "after"]


async def test_a_script_of_two_loops_goes_on_in_either_with_rows_that_it_looks_at_before(tmp_path: Path) -> None:
    seen: list[tuple[int, int, list[int]]] = []

    def script(dies: tuple[int, int] | None) -> Script:
        async def two(run: rl.Run) -> None:
            policy = await run.spawn(rl.Policy, FAKE)
            first, second = TASK.batches(2, run.seed), TASK.batches(2, run.seed + 1)
            assert next(first).groups.tolist() == [0, 1]
            for loop, (rows, count) in enumerate(((first, 3), (second, 5))):
                async for step in run.steps(count):
                    batch = next(rows)
                    await teach(policy, batch)
                    seen.append((loop, step, (batch.groups % 2**40).tolist()))
                    if (loop, step) == dies:
                        raise Killed

        return two

    for dies, begins, kept in (
        ((0, 2), (0, 0), ["step-000002"]),
        ((1, 2), (0, 2), ["step-000003", "step-000004"]),  # one after the last of a loop
        (None, (1, 1), ["step-000006", "step-000008"]),
    ):
        seen.clear()
        folder = await run(script(dies), tmp_path)
        every = [(loop, step) for loop, count in enumerate((3, 5)) for step in range(count)]
        done = [each for each in every if begins <= each <= (dies or each)]
        assert seen == [(loop, step, [2 * (step + 1 - loop), 2 * (step + 1 - loop) + 1]) for loop, step in done]
        events = read_events(folder / "events.jsonl", [])
        assert [(each.loop, each.step) for each in events if isinstance(each, Step)] == done
        assert names(folder) == kept


async def test_files_that_were_cut_are_told(tmp_path: Path) -> None:
    folder = await run(counting(9, dies_in=3), tmp_path)
    (folder / "metrics.jsonl").write_bytes(b"")
    told = r"metrics\.jsonl has 0 bytes, and had \d+ when the checkpoint of the resumed run was written"
    with pytest.raises(DataError, match=told):
        await run(counting(9), tmp_path)


async def test_a_number_may_come_twice_to_a_run_without_checkpoints(tmp_path: Path) -> None:
    async def twice(run: rl.Run) -> None:
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
        for _ in range(2):
            prompts = iter([rl.Batch.of(prompt=["a", "b"], answer=["1", "2"], groups=np.arange(2))])
            async with rl.rollouts(sampler, prompts, rl.Sampling()) as stream:
                assert len(await anext(stream)) == 2

    await run(twice, tmp_path, checkpoint_every=None, resume=False)
