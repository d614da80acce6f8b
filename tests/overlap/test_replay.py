"""Following the schedule of another run: which loops over steps may, and what becomes of steps after its end."""

import json
import re
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

import meshrl as rl
from meshrl.errors import DataError
from meshrl.overlap import Loop, Schedule, read_schedule
from meshrl.overlap.replay import Decision, Ended, Entry, Load
from meshrl.testing import FakeSampler

LOAD = Load(0, {"rank": [0], "load": [0], "call": [0], "steps": [-1]})
LAST: list[Entry] = [LOAD, Loop(4, 2), LOAD, Ended(0)]


def follow(folder: Path, entries: list[Entry], *loops: Loop) -> None:
    with closing(Schedule(folder / "schedule.jsonl", entries)) as kept:
        for loop in loops:
            kept.loop(loop)
            kept.end_loop()


def test_a_loop_whose_weights_come_as_before_is_followed(tmp_path: Path) -> None:
    table: list[tuple[list[Entry], Loop]] = [
        (LAST, Loop(4, 2)),
        (LAST, Loop(9, 2)),
        (LAST[:-1], Loop(9, 2)),  # it was broken off
        ([*LAST, LOAD], Loop(4, 2)),
        ([Loop(4, 2), Ended(0)], Loop(3, None)),  # no weights, nothing to wait for
        ([LOAD], Loop(3, None)),
    ]
    for entries, loop in table:
        follow(tmp_path, entries, loop)
        assert read_schedule(tmp_path) == [loop, Ended(0)], (entries, loop)
        (tmp_path / "schedule.jsonl").unlink()


def test_a_loop_whose_weights_might_never_come_is_refused(tmp_path: Path) -> None:
    table: list[tuple[list[Entry], list[Loop], str]] = [
        (LAST, [Loop(3, 2)], "steps = 4 there and 3 here"),
        (LAST, [Loop(4, None)], "evaluation.every = 2 there and nothing here"),
        (LAST, [Loop(9, 1)], "steps = 4 there and 9 here, evaluation.every = 2 there and 1 here"),
        ([*LAST, LOAD], [Loop(9, 2)], "steps = 4 there and 9 here"),
        ([*LAST, Loop(5, 2), LOAD, Ended(1)], [Loop(4, 2), Loop(3, 2)], "steps = 5 there and 3 here"),
    ]
    for entries, loops, told in table:
        with pytest.raises(DataError, match=re.escape(f"might wait for weights that never come: {told}. Follow")):
            follow(tmp_path, entries, *loops)


async def streamed(folder: Path, steps: int, **settings: object) -> list[rl.Batch]:
    batches: list[rl.Batch] = []
    async with rl.Run(rl.RunConfig.model_validate({"folder": str(folder), **settings})) as run:
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(backend="fake", model="none"))
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
        asked = rl.Batch.of(prompt=["cat>", "act>"], answer=["tac", "tca"])
        prompts = (asked.assign(groups=np.arange(2) + 2 * number) for number in range(30))
        async with rl.rollouts(sampler, prompts, rl.Sampling(), ahead=1) as stream:
            async for _ in run.steps(steps):
                batches.append(await anext(stream))
                await run.record(await policy.update(batches[-1], rl.CrossEntropy()))
                await rl.publish(policy, stream)
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
    first = await streamed(tmp_path, 3, name="first", deterministic=True)
    file = tmp_path / "first/schedule.jsonl"
    entries = read_schedule(file.parent)
    load = [at for at, entry in enumerate(entries) if isinstance(entry, Load)][1]
    deliver, draw = (entry.what if isinstance(entry, Decision) else "" for entry in entries[load - 3 : load - 1])
    assert (deliver, draw) == ("deliver", "draw")
    entries[load - 3 : load - 1] = reversed(entries[load - 3 : load - 1])
    entries[load] = Load(0, {"rank": [0, 0], "load": [1, 1], "call": [2, 3], "steps": [0, -1]})
    file.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    again = await streamed(tmp_path, 3, name="again", replay=str(file.parent))
    assert [batch.groups.tolist() for batch in again] == [batch.groups.tolist() for batch in first]


async def test_a_schedule_is_kept_where_no_column_travels_inline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run.inline_bytes = 0`: what a load returns lies on the rank, too, and is fetched."""
    load = FakeSampler.load

    async def telling(self: FakeSampler, weights: rl.Weights) -> rl.Batch:
        return (await load(self, weights)).assign(difference=np.array([0.5]))

    monkeypatch.setattr(FakeSampler, "load", telling)
    await streamed(tmp_path, 2, name="first", deterministic=True, inline_bytes=0)
    assert sum(isinstance(entry, Load) for entry in read_schedule(tmp_path / "first")) == 2
    steps = [json.loads(line) for line in (tmp_path / "first/metrics.jsonl").read_text("utf-8").splitlines()]
    assert [step.get("sampler_difference") for step in steps] == [None, 0.5]
