"""Following the schedule of another run: which loops over steps may, and what becomes of steps after its end."""

import asyncio
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from meshrl import (
    Batch,
    CrossEntropy,
    LocalEngine,
    Mesh,
    Policy,
    PolicyConfig,
    Resources,
    Run,
    RunConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    Weights,
    publish,
    rollouts,
)
from meshrl.errors import DataError
from meshrl.events import EventLog, sink
from meshrl.rollout import Loop, Schedule, read_schedule, schedule
from meshrl.rollout.replay import Decision, Ended, Entry, Load
from meshrl.testing import FakePolicy, FakeSampler, simulate

LOAD = Load(0, {"rank": [0], "load": [0], "call": [0], "steps": [-1]})
LAST = [LOAD, Loop(4, 2), LOAD, Ended(0)]
"""A loop after which no weights came."""


def follow(folder: Path, entries: list[Entry], *loops: Loop) -> None:
    kept = Schedule(folder / "schedule.jsonl", entries)
    try:
        for loop in loops:
            kept.loop(loop)
            kept.end_loop()
    finally:
        kept.close()


@pytest.mark.parametrize(
    ("entries", "loop"),
    [
        (LAST, Loop(4, 2)),
        (LAST, Loop(9, 2)),
        (LAST[:-1], Loop(9, 2)),  # it was broken off
        ([*LAST, LOAD], Loop(4, 2)),
        ([Loop(4, 2), Ended(0)], Loop(3, None)),  # no weights, nothing to wait for
        ([LOAD], Loop(3, None)),
    ],
)
def test_a_loop_whose_weights_come_as_before_is_followed(tmp_path: Path, entries: list[Entry], loop: Loop) -> None:
    follow(tmp_path, entries, loop)
    assert read_schedule(tmp_path) == [loop, Ended(0)]


@pytest.mark.parametrize(
    ("entries", "loops", "told"),
    [
        (LAST, [Loop(3, 2)], "steps = 4 there and 3 here"),
        (LAST, [Loop(4, None)], "evaluation.every = 2 there and nothing here"),
        (LAST, [Loop(9, 1)], "steps = 4 there and 9 here, evaluation.every = 2 there and 1 here"),
        ([*LAST, LOAD], [Loop(9, 2)], "steps = 4 there and 9 here"),
        ([*LAST, Loop(5, 2), LOAD, Ended(1)], [Loop(4, 2), Loop(3, 2)], "steps = 5 there and 3 here"),
    ],
)
def test_a_loop_whose_weights_might_never_come_is_refused(
    tmp_path: Path, entries: list[Entry], loops: list[Loop], told: str
) -> None:
    with pytest.raises(DataError, match=re.escape(f"might wait for weights that never come: {told}. Follow")):
        follow(tmp_path, entries, *loops)


async def streamed(folder: Path, steps: int, **settings: object) -> list[Batch]:
    batches: list[Batch] = []
    async with Run(RunConfig.model_validate({"folder": str(folder), **settings})) as run:
        policy = await run.spawn(Policy, PolicyConfig(backend="fake", model="none"))
        sampler = await run.spawn(Sampler, SamplerConfig(backend="fake", model="none"))
        asked = Batch.of(prompt=["cat>", "act>"], answer=["tac", "tca"])
        prompts = (asked.assign(groups=np.arange(2) + 2 * number) for number in range(30))
        async with rollouts(sampler, prompts, Sampling(), ahead=1) as stream:
            async for _ in run.steps(steps):
                batches.append(await anext(stream))
                await policy.update(batches[-1], CrossEntropy())
                await publish(policy, stream)
    return batches


async def test_more_steps_follow_a_schedule_to_its_end_and_go_on(tmp_path: Path) -> None:
    first = await streamed(tmp_path, 3, name="first", deterministic=True)
    again = await streamed(tmp_path, 7, name="again", replay=str(tmp_path / "first"))
    assert len(again) == 7
    for one, other in zip(first, again, strict=False):
        assert one.groups.tolist() == other.groups.tolist()
        np.testing.assert_array_equal(one.ragged("tokens").values, other.ragged("tokens").values)
        np.testing.assert_array_equal(one.ragged("versions").values, other.ragged("versions").values)


async def test_a_batch_comes_though_the_call_that_is_drawn_before_it_stands_still(tmp_path: Path) -> None:
    """What the trainer waits for is ready; that it is its turn says the draw alone, whose rows wait for new weights."""
    first = await streamed(tmp_path, 3, name="first", deterministic=True)
    file = tmp_path / "first/schedule.jsonl"
    entries = read_schedule(file.parent)
    load = [at for at, entry in enumerate(entries) if isinstance(entry, Load)][1]
    deliver, draw = (entry.what if isinstance(entry, Decision) else "" for entry in entries[load - 3 : load - 1])
    assert (deliver, draw) == ("deliver", "draw")
    entries[load - 3 : load - 1] = reversed(entries[load - 3 : load - 1])
    entries[load] = Load(0, {"rank": [0, 0], "load": [1, 1], "call": [2, 3], "steps": [0, -1]})
    file.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    again = await asyncio.wait_for(streamed(tmp_path, 3, name="again", replay=str(file.parent)), 30)
    assert [batch.groups.tolist() for batch in again] == [batch.groups.tolist() for batch in first]


def test_a_schedule_is_kept_where_no_column_travels_inline(tmp_path: Path) -> None:
    """`run.inline_bytes = 0`: what a load returns lies on the rank, too, and is fetched."""

    class Probed(FakeSampler):
        async def load(self, weights: Weights) -> Batch:
            return (await super().load(weights)).assign(difference=np.array([0.5]))

    async def script() -> dict[str, float]:
        engine, told = LocalEngine(inline_bytes=0), EventLog(tmp_path / "events.jsonl")
        sampler = await (await Mesh.reserve(engine, 1, Resources(cpus=0))).spawn(Probed, SamplerConfig(model="none"))
        kept = Schedule(tmp_path / "schedule.jsonl")
        sink.set(told)
        schedule.set(kept)
        try:
            await publish(FakePolicy(PolicyConfig(model="none")), sampler)
        finally:
            sink.set(None)
            schedule.set(None)
            kept.close()
            told.close()
            await engine.close()
        return dict(told.gauges)

    assert simulate(script)["sampler_difference"] == 0.5
    assert len(read_schedule(tmp_path)) == 1
