"""Weights that are sent as what changed: whoever fetches them has every bit, whatever he had before."""

import asyncio
import pickle
from collections.abc import Sequence
from random import Random
from typing import ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshrl import Weights
from meshrl.data import WeightSource
from meshrl.mesh import Rank, Ref, rank_context

SIZE = 5000


class Stored(Ref):
    """A value in another process: fetched as it is pickled, and counted."""

    fetches: ClassVar[list[int]] = []

    def __init__(self, value: object) -> None:
        self.data = pickle.dumps(value)

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        data = [each.data for each in held if isinstance(each, Stored)]
        cls.fetches += map(len, data)
        return [pickle.loads(each) for each in data]  # noqa: S301 -- what was stored here


def sent(weights: Weights) -> Weights:
    """As it comes to another machine."""
    Stored.fetches.clear()
    received = pickle.loads(pickle.dumps(weights.hold(Stored, 100, shares=False)))  # noqa: S301 -- our own
    assert isinstance(received, Weights)
    return received


@given(st.binary(max_size=200), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_change_gives_every_bit(data: bytes, changes: int, random: Random) -> None:
    sender, old = WeightSource(changes=True), np.frombuffer(data, np.uint8)
    new = old.copy()
    for _ in range(changes if len(new) else 0):
        new[random.randrange(len(new))] ^= np.uint8(1 << random.randrange(8))
    for version, values in enumerate((old, new, old)):
        loaded = asyncio.run(sent(sender.weights(version, [("values", values)], None)).load())
        assert loaded.tensors["values"].tobytes() == values.tobytes()


async def test_who_has_a_version_fetches_what_changed_since() -> None:
    sender, values = WeightSource(changes=True), np.arange(SIZE, dtype=np.float32)
    versions: list[Weights] = []
    for version in range(4):
        values[version * 10 : version * 10 + 10] += 1
        versions.append(sender.weights(version, [("values", values)], None))
    travelled = [sent(each) for each in versions]
    first = await travelled[0].load()
    assert sum(Stored.fetches) > SIZE * 4
    for version in (1, 3):
        loaded = await travelled[version].load()
        assert loaded == versions[version]
        assert loaded.tensors["values"].tobytes() == versions[version].tensors["values"].tobytes()
        assert not any(bucket.damaged() for bucket in loaded.buckets)
    assert sum(Stored.fetches) - SIZE * 4 < SIZE, "three changes, of a bit for each 16"
    assert first.tensors["values"].tobytes() == versions[0].tensors["values"].tobytes(), "what he has stays"
    assert (await travelled[0].load()) == versions[0], "also an older one, anew"
    assert versions[3].buckets[0].nbytes == SIZE * 4


async def test_what_changes_as_a_whole_is_sent_as_a_whole_and_a_history_does_not_grow_without_end() -> None:
    sender, random = WeightSource(changes=True), np.random.default_rng(0)
    for version in range(3):
        values = random.standard_normal(SIZE).astype(np.float32)
        loaded = await sent(sender.weights(version, [("values", values)], None)).load()
        (fetched,) = Stored.fetches
        assert SIZE * 4 < fetched < SIZE * 4 + 1000, "a change would say which words, too"
        assert loaded.tensors["values"].tobytes() == values.tobytes()
    sender, values = WeightSource(changes=True), np.zeros(SIZE, np.float32)
    sizes: list[int] = []
    for version in range(40):
        values[:400] = version
        weights = sender.weights(version, [("values", values.copy())], None)
        assert await sent(weights).load() == weights
        sizes.append(sum(Stored.fetches))
    assert sum(size > SIZE * 4 for size in sizes) > 1, "it begins anew"
    assert sum(size < SIZE * 2 for size in sizes) > 30


async def test_another_model_is_another_history() -> None:
    for changes in (True, False):
        sender = WeightSource(changes=changes)
        for names in (["a", "b"], ["b"], ["a"]):
            weights = sender.weights(0, [(name, np.zeros(SIZE)) for name in names], None)
            assert list(weights.tensors) == names
            assert await sent(weights).load() == weights


async def test_each_rank_sends_what_changed_of_its_own() -> None:
    senders: list[WeightSource] = []
    for rank in range(2):
        token = rank_context.set(Rank(index=rank, size=2, axes={"dp": rank}, shape={"dp": 2}))
        senders.append(WeightSource(changes=True))
        rank_context.reset(token)
    for version in range(3):
        values = [np.full(SIZE, rank + (version == 2), np.float32) for rank in range(2)]
        parts = [each.weights(version, [(f"values{rank}", values[rank])], None) for rank, each in enumerate(senders)]
        whole = Weights.join(parts)
        assert await sent(whole).load() == whole
        if version == 1:
            assert sum(Stored.fetches) < SIZE, "nothing has changed but the version"
