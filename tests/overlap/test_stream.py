import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
import pytest

import meshrl as rl
from meshrl.data import AdapterOf
from meshrl.errors import DataError, EngineDied
from meshrl.mesh import current_rank, running_calls, slow_calls
from meshrl.overlap import read_schedule
from meshrl.overlap.replay import Decision, Load, Opened
from meshrl.overlap.stream_state import SwapMode
from meshrl.tasks.cursor import DataCursor, data_cursor, in_ranges
from meshrl.testing import Deadlock, FakePolicy, FakeReward, FakeSampler, Lognormal, crashing, delayed, simulate
from tests.overlap.streams import POLICY, REWARD, SAMPLER, noted, spawned, trained

SAMPLING = rl.Sampling(n=3)


def prompts(size: int) -> Iterator[rl.Batch]:
    for first in count(0, size):
        numbers = np.arange(first, first + size)
        answers = ["x" * (number % 5 + 1) for number in numbers]
        yield rl.Batch.of(prompt=[f"{number}>" for number in numbers], answer=answers, groups=numbers)


async def train(policy: rl.Policy, batch: rl.Batch) -> None:
    await policy.update(batch.assign(advantages=batch.rewards - 0.5), rl.ClippedLoss())


async def streamed(
    steps: int, size: int = 4, sampler: rl.Sampler | None = None, parts: int = 1, **chosen: object
) -> list[rl.Batch]:
    policy, sampler = FakePolicy(POLICY), sampler or FakeSampler(SAMPLER)
    reward = FakeReward(REWARD)
    batches: list[rl.Batch] = []
    await rl.publish(policy, sampler)
    stream = rl.rollouts(sampler, prompts(size), SAMPLING, score=reward.score, **chosen)  # type: ignore[arg-type]
    async with stream:
        for _ in range(steps):
            if parts > 1:
                batches += [part async for part in stream.parts(parts)]
            else:
                batches.append(await anext(stream))
            await train(policy, batches[-1])
            await rl.publish(policy, stream)
    return batches


def same(one: rl.Batch, other: rl.Batch) -> bool:
    return set(one.names) == set(other.names) and one.to_wire() == other.only(*one.names).to_wire()


def groups(batches: list[rl.Batch]) -> list[int]:
    return [label for batch in batches for label in dict.fromkeys(batch.groups.tolist())]


@pytest.mark.bits
@pytest.mark.parametrize("ranks", [1, 3])
async def test_with_ahead_0_a_batch_is_that_of_the_plain_loop(ranks: int) -> None:
    engine = rl.LocalEngine(inline_bytes=64)
    sampler = await spawned(FakeSampler, engine, ranks)
    stream = [await batch.load() for batch in await streamed(4, sampler=sampler)]
    sampler = await spawned(FakeSampler, engine, ranks)
    policy, reward, drawn = FakePolicy(POLICY), FakeReward(REWARD), prompts(4)
    await rl.publish(policy, sampler)
    for batch in stream:
        plain = await (await reward.score(await rl.rollout(sampler, next(drawn), SAMPLING))).load()
        await train(policy, plain)
        await rl.publish(policy, sampler)
        assert same(plain.drop("aborted"), batch.drop("staleness"))
    await engine.close()


async def test_every_prompt_is_delivered_once_with_its_whole_group_and_the_last_batch_may_be_smaller() -> None:
    few = [*islice(prompts(4), 3), next(prompts(100)).select([98, 99])]
    batches = await trained(FakeSampler(SAMPLER), few, n=3, ahead=2)
    for batch in batches:
        assert batch.groups.tolist() == np.repeat(batch.groups[::3], 3).tolist()
    assert sorted(groups(batches)) == [*range(12), 98, 99]
    assert [len(batch) for batch in batches] == [12, 12, 12, 6]


async def test_prompts_that_do_not_come_are_reported_as_a_call_that_takes_long() -> None:
    reported: list[str] = []

    def slowly() -> Iterator[rl.Batch]:
        while not reported:  # until it has taken twice as long as ever
            reported.extend(slow_calls(0))
        yield next(prompts(4))

    async with rl.rollouts(FakeSampler(SAMPLER), slowly(), SAMPLING) as stream:
        await anext(stream)
    assert reported == ["next(prompts), for which everything else waits, has been running for 0 s"]
    assert not running_calls()


def test_rollouts_go_on_while_the_policy_trains() -> None:
    async def took(ahead: int) -> float:
        loop, ends = asyncio.get_running_loop(), list[float]()
        policy = delayed(FakePolicy, update=3.0)(POLICY)
        sampler = delayed(FakeSampler, generate=0.25)(SAMPLER)
        await trained(
            sampler, islice(prompts(4), 12), policy, n=3, ahead=ahead, then=lambda _: ends.append(loop.time())
        )
        return ends[-1] - ends[1]

    assert simulate(lambda: took(0)) == pytest.approx(10 * (12 * 0.25 + 3))
    assert simulate(lambda: took(1)) == pytest.approx(10 * 3, rel=0.1)


def test_a_step_begins_before_its_batch_is_whole() -> None:
    async def took(ahead: int, parts: int) -> tuple[float, list[int]]:
        policy = delayed(FakePolicy, forward_backward=3.0 / parts)(POLICY)
        sampler, sizes, ends = delayed(FakeSampler, generate=0.25)(SAMPLER), list[int](), list[float]()
        await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, prompts(4), SAMPLING, ahead=ahead) as stream:
            for _ in range(12):
                async for part in stream.parts(parts):
                    assert len(part) == 3 * len(set(part.groups.tolist()))
                    sizes.append(len(part))
                    await policy.forward_backward(part, rl.CrossEntropy())
                await policy.step()
                await rl.publish(policy, stream)
                ends.append(asyncio.get_running_loop().time())
        return ends[-1] - ends[1], sizes

    assert simulate(lambda: took(0, 1))[0] == pytest.approx(10 * (12 * 0.25 + 3))
    seconds, sizes = simulate(lambda: took(0, 4))
    assert seconds == pytest.approx(10 * (12 * 0.25 + 3 / 4), rel=0.1)
    assert sizes == [3] * 4 * 12


def test_what_is_left_of_a_batch_comes_before_the_next() -> None:
    async def script() -> list[list[int]]:
        policy, sampler, cursor = FakePolicy(POLICY), FakeSampler(SAMPLER), DataCursor()
        data_cursor.set(cursor)
        await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, islice(prompts(4), 2), rl.Sampling(), ahead=1) as stream:
            begun = [await anext(stream.parts(4))]
            with pytest.raises(
                DataError, match="2 of the 4 groups of a batch were delivered in parts: take the others"
            ):
                await anext(stream)
            with pytest.raises(DataError, match=r"2 of the 4 groups .* before a checkpoint, from which a resumed run"):
                cursor.reached()
            with pytest.raises(DataError, match="cannot come in 0 parts"):
                await anext(stream.parts(0))
            left = [part async for part in stream.parts(2)]
            assert len(list(in_ranges(cursor.reached().used))) == 4
            await rl.publish(policy, stream)
            whole, ended = await anext(stream), [part async for part in stream.parts(3)]
            return [groups(each) for each in (begun, left, [whole], ended)]

    delivered = simulate(script)
    assert [len(each) for each in delivered] == [2, 2, 4, 0]
    assert sorted(chain.from_iterable(delivered)) == [*range(8)]


def test_groups_that_keep_does_not_want_are_replaced() -> None:
    def keep(batch: rl.Batch) -> object:
        assert (np.bincount(batch.groups)[np.unique(batch.groups)] == 3).all()
        return batch.groups % 3 != 0

    for ahead in (0, 2):
        batches = asyncio.run(streamed(5, ahead=ahead, keep=keep))
        assert all(len(batch) == 12 for batch in batches)
        assert not any(label % 3 == 0 for label in groups(batches))


def test_a_group_has_a_signal_where_its_rewards_differ() -> None:
    batch = rl.Batch.of(groups=np.array([7, 3, 7, 3, 5]), rewards=np.array([0, 1, 1, 1, 0], np.float32))
    assert rl.has_signal(batch).tolist() == [True, False, True, False, False]
    assert rl.has_signal(batch.select([])).tolist() == []


def test_what_publishing_does_to_rollouts_that_run() -> None:
    for swap in ("in_flight", "drain", "abort"):
        slow = delayed(FakeSampler, generate=1.0)(SAMPLER)
        batches = simulate(lambda: streamed(8, ahead=2, swap=swap, sampler=slow))  # noqa: B023 -- called at once
        for step, batch in enumerate(batches):
            assert np.add(batch.row("oldest_version"), batch.row("staleness")).tolist() == [step] * len(batch)
        whole = rl.Batch.concat(batches)
        per_call = [set(whole.select(whole.groups // 4 == call).row("oldest_version").tolist()) for call in range(5)]
        assert any(len(versions) > 1 for versions in per_call) == (swap != "drain"), swap


def test_rollouts_that_a_failing_sampler_lost_are_drawn_again() -> None:
    poor = crashing(delayed(FakeSampler, generate=Lognormal(1.0, 1.0)), generate=[5, 30, 31])(SAMPLER)
    batches = simulate(lambda: streamed(8, ahead=2, sampler=poor, retries=3))
    assert set(groups(batches)) >= set(range(6 * 4))
    poor = crashing(FakeSampler, generate=[5, 60])(SAMPLER)
    with pytest.raises(Exception, match="told to crash at its value 60"):
        simulate(lambda: streamed(8, ahead=2, sampler=poor, retries=1))
    poor = crashing(FakeSampler, generate=[5])(SAMPLER)
    with pytest.raises(Exception, match="told to crash at its value 5"):
        simulate(lambda: streamed(8, ahead=2, sampler=poor))


def test_a_sampler_whose_engine_died_while_it_took_weights_is_respawned() -> None:
    lives = count()

    class Mortal(FakeSampler):
        def __init__(self, config: rl.SamplerConfig) -> None:
            super().__init__(config)
            self._left = 2 if next(lives) == 0 else 1000

        async def load(self, weights: rl.Weights) -> rl.Batch:
            self._left -= 1
            if self._left < 0:
                raise EngineDied("the engine has died")
            return await super().load(weights)

    async def script() -> list[rl.Batch]:
        return await streamed(8, ahead=1, sampler=await spawned(Mortal, rl.LocalEngine(), 1), retries=1)

    assert set(groups(simulate(script))) >= set(range(6 * 4))
    assert next(lives) == 2


def test_who_does_not_publish_is_told_who_waits_for_whom() -> None:
    async def script() -> None:
        async with rl.rollouts(FakeSampler(SAMPLER), prompts(2), SAMPLING, ahead=1) as stream:
            async for _ in stream:
                pass

    with pytest.raises(Deadlock, match="trainer waits for a batch: 0 of 2 groups are ready") as caught:
        simulate(script)
    assert "rollout waits for capacity: capacity waits for version 1: with ahead=1, 4 prompts" in str(caught.value)
    assert "(delivered batches: 2, publications: 0), so no more may be drawn: call `await publish" in str(caught.value)


class Forgetful(FakeSampler):
    async def generate(self, prompts: rl.Batch, sampling: rl.Sampling) -> AsyncIterator[rl.Batch]:
        rows = [row async for row in super().generate(prompts, sampling)]
        for row in rows[1:]:
            yield row


def test_mistakes_are_told() -> None:
    async def shorter(batch: rl.Batch) -> rl.Batch:
        return batch.select(np.arange(len(batch) - 1)).assign(rewards=np.zeros(len(batch) - 1))

    async def drawn(asked: Iterable[rl.Batch], **chosen: object) -> None:
        async with rl.rollouts(FakeSampler(SAMPLER), asked, SAMPLING, **chosen) as stream:  # type: ignore[arg-type]
            await anext(stream)
            await anext(stream)

    async def beside() -> None:
        slow = delayed(FakeSampler, generate=1.0)(SAMPLER)
        async with rl.rollouts(slow, prompts(4), SAMPLING, swap="abort") as stream:
            await anext(stream)
            await asyncio.gather(rl.rollout(slow, next(prompts(4)), SAMPLING), rl.publish(FakePolicy(POLICY), stream))

    table: dict[str, Callable[[], Coroutine[object, object, object]]] = {
        "ahead = -1": lambda: streamed(1, ahead=-1),
        "late = 'never': use one of 'wait', 'drop'": lambda: streamed(1, late="never"),
        "swap = 'no': use one of 'in_flight', 'drain', 'abort'": lambda: streamed(1, swap="no"),
        "a batch of no prompts": lambda: streamed(1, size=0),
        "returned 11 rollouts for 4 prompts x 3": lambda: streamed(1, sampler=Forgetful(SAMPLER)),
        'a stream with swap="abort" on the same sampler aborted': beside,
        "`keep` dropped 101 groups": lambda: trained(
            FakeSampler(SAMPLER), islice(prompts(1), 102), keep=lambda batch: batch.groups == 0
        ),
        "`score` was given 3 rows and returned 2": lambda: drawn(prompts(4), score=shorter),
        "group 0 was drawn again while it was in progress": lambda: drawn([next(prompts(2))] * 2, ahead=1),
        "needs prompts with `groups`": lambda: drawn([next(prompts(2)).drop("groups")]),
        r"`keep` dropped 40[0-9] groups since the last batch, which needs 4": lambda: streamed(
            1, keep=lambda batch: np.zeros(len(batch))
        ),
    }
    for told, wrong in table.items():
        with pytest.raises(DataError, match=told):
            simulate(wrong)


async def test_a_stream_counts_the_publications_of_one_adapter() -> None:
    class Adapted(FakePolicy):
        async def weights(self, adapter: str | None = None) -> rl.Weights:
            made = await super().weights()
            return rl.Weights.of(made.version, made.buckets, adapter=AdapterOf(adapter, 2, 4) if adapter else None)

    policy, sampler = Adapted(POLICY), FakeSampler(SAMPLER)
    async with rl.rollouts(sampler, prompts(2), SAMPLING) as stream:
        for name in ("a", "b", None):
            await rl.publish(policy, stream, adapter=name)  # all that there are, before the first batch
        for age in range(2):
            batch = await anext(stream)
            assert (stream.ledger.version, set(batch.row("staleness").tolist())) == (age, {0})
            await policy.update(batch, rl.CrossEntropy())
            await rl.publish(policy, stream, adapter="a")
            for other, told in (("b", "the adapter 'b'"), (None, "the whole model")):
                with pytest.raises(DataError, match=rf"of {told} \(version {age + 1}\) were .* of the adapter 'a'"):
                    await rl.publish(policy, stream, adapter=other)


async def test_a_stream_is_used_inside_its_block_alone_and_weights_are_published_to_it() -> None:
    policy, sampler = FakePolicy(POLICY), FakeSampler(SAMPLER)
    stream = rl.rollouts(sampler, prompts(2), SAMPLING)
    with pytest.raises(DataError, match="inside its `async with`"):
        await anext(stream)
    async with stream:
        await anext(stream)
        with pytest.raises(DataError, match="publish to the stream"):
            await rl.publish(policy, sampler)
    with pytest.raises(DataError, match="inside its `async with`"):
        await anext(stream)


@pytest.mark.bits
@pytest.mark.parametrize(("swap", "ranks", "parts"), [("in_flight", 1, 3), ("drain", 2, 1), ("abort", 2, 1)])
def test_a_run_that_follows_a_schedule_computes_the_same_bits(
    tmp_path: Path, swap: SwapMode, ranks: int, parts: int
) -> None:
    def run(name: str, seed: int, replayed: str | None = None) -> list[rl.Batch]:
        async def script() -> list[rl.Batch]:
            slow = delayed(FakeSampler, generate=Lognormal(1.0, 1.0), seed=seed)
            sampler = await spawned(slow, rl.LocalEngine(), ranks)
            chosen: dict[str, object] = {"swap": swap, "keep": lambda batch: batch.groups % 5, "sampler": sampler}
            return await streamed(10, ahead=2, parts=parts, **chosen)  # type: ignore[arg-type]

        with noted(tmp_path, name, replayed):
            return simulate(script, seed=seed)

    first, other, again = run("first", 1), run("other", 2), run("again", 3, replayed="first")
    assert all(map(same, first, again))
    assert not all(map(same, first, other))
    before, after = (read_schedule(tmp_path / name) for name in ("first", "again"))
    for kind in (Opened, Decision, Load):  # a load is noted when the last rank has it: beside which draw, time decides
        there, here = ([each for each in entries if type(each) is kind] for entries in (before, after))
        assert here[: len(there)] == there
    divided = [each.owners for each in before if isinstance(each, Decision)]
    assert any(owners != [row % ranks for row in range(len(owners))] for owners in divided) == (ranks > 1)


class Broken(FakeSampler):
    """Cannot load version 1 at first."""

    failures = 1

    async def load(self, weights: rl.Weights) -> rl.Batch:
        if weights.version and self.failures:
            self.failures -= 1
            raise DataError("no room for weights")
        return await super().load(weights)


class Passing(rl.Weights):
    @property
    def lasts(self) -> bool:
        return False


class PassingPolicy(FakePolicy):
    async def weights(self, adapter: str | None = None) -> rl.Weights:
        whole = await super().weights(adapter)
        return Passing(whole.version, whole.tensors)


@pytest.mark.parametrize(
    ("policy", "ahead", "swap", "waits"),
    [
        (FakePolicy, 1, "in_flight", 0),
        (FakePolicy, 0, "in_flight", 5),
        (FakePolicy, 1, "drain", 5),
        (FakePolicy, 1, "abort", 5),
        (PassingPolicy, 1, "in_flight", 5),
    ],
)
def test_the_script_goes_on_while_the_sampler_loads_weights_that_last(
    policy: type[FakePolicy], ahead: int, swap: SwapMode, waits: float
) -> None:
    async def script() -> None:
        now, trainer, sampler = asyncio.get_running_loop().time, policy(POLICY), delayed(FakeSampler, load=5.0)(SAMPLER)
        await rl.publish(trainer, sampler)
        async with rl.rollouts(sampler, prompts(4), SAMPLING, ahead=ahead, swap=swap) as stream:
            await trainer.update(await anext(stream), rl.CrossEntropy())
            began = now()
            await rl.publish(trainer, stream)
            assert now() - began == waits
            batch = await anext(stream)
            assert now() - began == waits
            assert batch.row("staleness").max() == ahead  # the publication counts, though the weights are on their way
            beside = await rl.rollout(sampler, next(prompts(1)), SAMPLING)
            assert now() - began == 5
            assert set(beside.versions.values.tolist()) <= {-1, 1}
            await trainer.update(batch, rl.CrossEntropy())
            await rl.publish(trainer, stream)
        assert now() - began == 10  # the sampler has the last weights when the stream ends

    simulate(script)


@pytest.mark.parametrize("way", ["end", "publish", "rollout", "batch", "own error"])
def test_the_error_of_a_load_is_raised_once_by_what_comes_next(way: str) -> None:
    async def script() -> None:
        policy, sampler = FakePolicy(POLICY), delayed(Broken, load=1.0)(SAMPLER)
        await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, prompts(4), SAMPLING, ahead=1) as stream:
            await policy.update(await anext(stream), rl.CrossEntropy())
            await rl.publish(policy, stream)
            if way == "own error":
                raise ValueError("of the script")
            if way == "end":
                return
            if way == "batch":
                await anext(stream)  # it was drawn before
            again: dict[str, Callable[[], Awaitable[object]]] = {
                "publish": lambda: rl.publish(policy, stream),
                "rollout": lambda: rl.rollout(sampler, next(prompts(1)), SAMPLING),
                "batch": lambda: anext(stream),
            }
            with pytest.raises(DataError, match="no room for weights"):
                await again[way]()
            await rl.publish(policy, stream)
            batch = await anext(stream)
            assert batch.row("staleness").max() <= 1

    errors = {"end": "no room for weights", "own error": "of the script"}
    with pytest.raises((DataError, ValueError), match=errors[way]) if way in errors else nullcontext():
        simulate(script)


def test_weights_that_one_replica_has_before_the_others_count_for_the_age_of_its_rows() -> None:
    class Late(FakeSampler):
        async def load(self, weights: rl.Weights) -> rl.Batch:
            if weights.version and current_rank().index == 1:
                await asyncio.sleep(6)
            return await super().load(weights)

    async def script() -> None:
        policy = FakePolicy(POLICY)
        sampler = await spawned(delayed(Late, generate=Lognormal(1, 1), seed=1), rl.LocalEngine(), 2)
        await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, prompts(4), SAMPLING, ahead=2) as stream:
            for _ in range(12):
                batch = await anext(stream)
                age = policy.version - np.asarray(batch.row("oldest_version"), np.int64)
                assert age.tolist() == batch.row("staleness").tolist()
                await policy.update(batch, rl.CrossEntropy())
                await rl.publish(policy, stream)

    simulate(script)
