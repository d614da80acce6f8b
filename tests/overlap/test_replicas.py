import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

import meshrl as rl
from meshrl.data import AdapterOf
from meshrl.errors import ConfigError, ContractError, DataError, DataLost, OtherVersions, RankDied, RankFailed
from meshrl.mesh import CollectiveActor, Member, parts, replicas
from meshrl.testing import FakePolicy, FakeSampler, delayed, simulate
from tests.overlap.streams import POLICY, SAMPLER, FragileEngine, labels, noted, prompts, spawned, trained


async def outlives(
    role: type[FakeSampler], engine: FragileEngine, min_ranks: int = 0, policy: FakePolicy | None = None, die: int = 2
) -> list[rl.Batch]:
    sampler = await spawned(delayed(role, generate=1.0), engine, 2, min_ranks)

    def then(step: int) -> None:
        if step == die:
            engine.kill(1)

    return await trained(sampler, prompts(6, 4), policy, ahead=1, retries=1, then=then)


EVERY, NEVER = set(range(24)), 99


@pytest.mark.parametrize("min_ranks", [0, 1, 2])
def test_a_replica_that_cannot_be_made_again_ends_the_stream_where_it_is_wanted(min_ranks: int) -> None:
    lives = list[float]()

    class Twice(FakeSampler):
        def __init__(self, config: rl.SamplerConfig) -> None:
            super().__init__(config)
            lives.append(asyncio.get_running_loop().time())
            if len(lives) > 2:
                raise ValueError("no room on this GPU")

    class AtOnce(FragileEngine):
        async def restart(self, members: Sequence[Member]) -> None:
            await rl.LocalEngine.restart(self, members)

    if min_ranks == 1:
        assert labels(simulate(lambda: outlives(Twice, AtOnce(0), min_ranks))) == EVERY
        assert [at - lives[2] for at in lives[2:7]] == [0, 0, 1, 3, 7], "at once, and then less and less"
    else:
        with pytest.raises(RankFailed, match=r"Twice.__init__ on rank 1 \(dp=1\) failed: ValueError: no room"):
            simulate(lambda: outlives(Twice, FragileEngine(0), min_ranks))


def test_a_needed_replica_waits_for_another_node_if_the_first_is_refused() -> None:
    refusals: list[ConfigError] = [OtherVersions("a node has other versions")] * 2

    class Refusing(FragileEngine):
        async def restart(self, members: Sequence[Member]) -> None:
            if refusals:
                raise refusals.pop()
            await super().restart(members)

    assert labels(simulate(lambda: outlives(FakeSampler, Refusing(0), 2))) == EVERY
    assert not refusals
    refusals.append(ConfigError("Ray's head is gone"))
    with pytest.raises(ConfigError, match="head is gone"):
        simulate(lambda: outlives(FakeSampler, Refusing(0), 2))


class Passing(rl.Weights):
    @property
    def lasts(self) -> bool:
        return False


def test_a_replica_that_comes_when_its_weights_are_gone_begins_with_the_next() -> None:
    lives, refused, taken = count(), list[int](), list[int]()

    class Sending(FakePolicy):
        async def weights(self, adapter: str | None = None) -> rl.Weights:
            made = await super().weights(adapter)
            return Passing.of(made.version, made.buckets)

    class Late(FakeSampler):
        def __init__(self, config: rl.SamplerConfig) -> None:
            super().__init__(config)
            self._life = next(lives)

        async def load(self, weights: rl.Weights) -> rl.Batch:
            if self._life == 2:
                refused.append(weights.version)
                raise DataLost("the policy", "it was updated since")
            if self._life > 2:
                taken.append(weights.version)
            return await super().load(weights)

    assert labels(simulate(lambda: outlives(Late, FragileEngine(0), policy=Sending(POLICY)))) == EVERY
    assert len(refused) == 1
    assert taken[0] > refused[0]


@pytest.mark.parametrize("min_ranks", [0, 1])
def test_a_replica_that_comes_back_gets_the_newest_weights_of_every_adapter(min_ranks: int) -> None:
    lives, taken = count(), list[tuple[int, str, int]]()

    class Adapted(FakePolicy):
        async def weights(self, adapter: str | None = None) -> rl.Weights:
            made = await super().weights()
            of = AdapterOf(adapter, 2, 4) if adapter else None
            return rl.Weights.of(made.version, made.buckets, adapter=of)

    class Told(FakeSampler):
        def __init__(self, config: rl.SamplerConfig) -> None:
            super().__init__(config)
            self._life = next(lives)

        async def load(self, weights: rl.Weights) -> rl.Batch:
            taken.append((self._life, weights.adapter.name if weights.adapter else "", weights.version))
            return await super().load(weights)

    async def story() -> None:
        engine, policy = FragileEngine(0), Adapted(POLICY)
        sampler = await spawned(delayed(Told, generate=1.0), engine, 2, min_ranks)
        await rl.publish(policy, sampler, adapter="b")
        await rl.publish(policy, sampler, adapter="a")
        async with rl.rollouts(sampler, prompts(6, 4), rl.Sampling(n=2), ahead=1, retries=1) as stream:
            await rl.publish(policy, stream)
            async for batch in stream:
                await policy.update(await batch.load(), rl.CrossEntropy())
                await rl.publish(policy, stream, adapter="b")
                if policy.version == 2:
                    engine.kill(1)

    simulate(story)
    again = [(name, version) for life, name, version in taken if life == 2]
    assert again[:2] == [("", 0), ("a", 0)]
    assert again[2][0] == "b"
    assert again[2][1] >= 2


def test_a_schedule_in_which_a_replica_died_is_not_replayed(tmp_path: Path) -> None:
    def run(name: str, replayed: str | None = None, die: int = 2) -> list[rl.Batch]:
        with noted(tmp_path, name, replayed):
            return simulate(lambda: outlives(FakeSampler, FragileEngine(0), die=die))

    run("broken")
    with pytest.raises(DataError, match="cannot be replayed: rows were lost with replica 1 of its sampler"):
        run("again", "broken")
    assert run("whole", die=NEVER) == run("same", "whole", die=NEVER)
    with pytest.raises(DataError, match="cannot be followed any more: rows were lost with replica 1"):
        run("dies", "whole")


class Together(FakeSampler, CollectiveActor):
    def agree(self, work: object) -> list[object]:  # type: ignore[override]
        return []


@pytest.mark.parametrize("retries", [0, 1])
def test_rows_that_are_lost_on_their_way_are_drawn_again(retries: int) -> None:
    lost = DataLost("node2 (10.0.0.2)", "nothing was heard of its host")
    failed = RankFailed("Judge", 0, {"dp": 0}, "score", str(lost), "")
    failed.__cause__ = lost
    calls = count()

    async def score(batch: rl.Batch) -> rl.Batch:
        if next(calls) == 2:
            raise failed
        return batch

    async def script() -> list[rl.Batch]:
        sampler = delayed(FakeSampler, generate=1.0)(SAMPLER)
        return await trained(sampler, prompts(6, 4), ahead=1, score=score, retries=retries)

    if retries:
        assert sorted(rl.Batch.concat(simulate(script)).groups.tolist()) == sorted([*range(24)] * 2)
    else:
        with pytest.raises(RankFailed, match=r"what a rank made cannot be read from node2 \(10.0.0.2\)"):
            simulate(script)


async def test_replicas_are_ranks_that_work_alone() -> None:
    engine = rl.LocalEngine()
    mesh = await rl.Mesh.reserve(engine, 4, rl.Resources(cpus=0))
    alone = await mesh.spawn(FakeSampler, SAMPLER)
    assert len(replicas(alone)) == parts(alone.generate) == 4
    pairs = await mesh.shape(dp=2, tp=2).spawn(FakeSampler, SAMPLER)
    assert replicas(pairs) == [pairs]
    together = await mesh.spawn(Together, SAMPLER)
    assert replicas(together) == [together]
    plain = FakeSampler(SAMPLER)
    assert replicas(plain) == [plain]
    shrinking = await rl.Mesh.reserve(engine, 4, rl.Resources(cpus=0, min_ranks=2))
    with pytest.raises(ContractError, match=r"Together cannot be spawned on a mesh of dp=4 .*\(min_ranks = 2\)"):
        await shrinking.spawn(Together, SAMPLER)
    with pytest.raises(ContractError, match="needs the axis dp only"):
        await shrinking.shape(dp=2, tp=2).spawn(FakeSampler, SAMPLER)
    await engine.close()


def test_a_replica_that_died_before_the_first_batch_is_used_once_another_call_has_brought_it_back() -> None:
    async def story() -> int:
        engine, policy = FragileEngine(0), FakePolicy(POLICY)
        sampler = await spawned(FakeSampler, engine, 1, 1)
        await rl.publish(policy, sampler)
        async with rl.rollouts(sampler, prompts(2, 3), rl.Sampling(n=1)) as stream:
            engine.kill(0)
            await rl.publish(policy, stream)
            await rl.rollout(sampler, next(prompts(1, 3)), rl.Sampling(n=1))
            return len(await anext(stream))

    assert simulate(story) == 3


def test_the_death_of_a_sampler_that_is_on_no_mesh_is_told_whenever_it_comes() -> None:
    class Dies(FakeSampler):
        async def load(self, weights: rl.Weights) -> rl.Batch:
            raise RankDied("FakeSampler", 0, {"dp": 0}, "load", 7, "here", "crashed")

    async def story() -> None:
        stream = rl.rollouts(Dies(SAMPLER), prompts(2, 3), rl.Sampling(n=1), retries=1)
        async with stream:
            await rl.publish(FakePolicy(POLICY), stream)

    with pytest.raises(RankDied, match="crashed"):
        simulate(story)
