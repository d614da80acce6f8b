"""Columns that stay where they were made: what can be done without their values, and when they can be read."""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.data import Batch, Ragged
from meshrl.errors import DataError
from meshrl.mesh import Ref
from tests.data.test_batch import batches, rollouts


class Kept(Ref):
    """A held value that counts its readers; it travels as a number, as a reference would."""

    store: ClassVar[dict[int, object]] = {}
    reads: ClassVar[list[int]] = []

    def __init__(self, value: object) -> None:
        self.number = len(self.store)
        self.store[self.number] = value

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        numbers = [each.number for each in cast("Sequence[Kept]", held)]
        cls.reads.extend(numbers)
        return [pickle.loads(pickle.dumps(cls.store[number], 5)) for number in numbers]  # noqa: S301 -- its own


class Merged(Kept):
    """One of several references that are the same one where they arrive, as on Ray."""

    made: ClassVar[list["Merged"]] = []

    def __init__(self, value: object) -> None:
        super().__init__(value)
        self.made.append(self)

    def __reduce__(self) -> tuple[Callable[[], "Merged"], tuple[()]]:
        return first_made, ()


def first_made() -> Merged:
    return Merged.made[0]


def travelled(batch: Batch) -> Batch:
    return cast("Batch", pickle.loads(pickle.dumps(batch, 5)))  # noqa: S301 -- its own


@given(batches(), st.integers(1, 4), st.integers(1, 4), st.sampled_from([0, 60]))
def test_rows_move_from_part_to_part_without_their_values(batch: Batch, n: int, m: int, limit: int) -> None:
    """Made on n ranks, joined, given to m ranks, joined: the same batch, and nothing is read on the way."""
    joined = Batch.join([travelled(part.hold(Kept, limit)) for part in batch.split(n)])
    Kept.reads.clear()
    again = Batch.join([travelled(part) for part in joined.split(m)], joined.plan(m))
    reordered = again.select(np.arange(len(batch))[::-1]).repeat(2)
    assert Kept.reads == []
    assert again.lengths.tolist() == batch.lengths.tolist()
    assert asyncio.run(again.load()) == batch
    assert asyncio.run(reordered.load()) == batch.select(np.arange(len(batch))[::-1]).repeat(2)


async def test_a_column_is_read_after_it_was_loaded() -> None:
    whole = rollouts().assign(sampler_logprobs=Ragged.of([np.ones(n) for n in range(1, 5)], np.float32))
    batch = Batch.join([part.hold(Kept, 7) for part in whole.split(2)])
    assert set(batch.elsewhere) == {"prompt", "tokens", "sampler_logprobs", "rewards", "groups", "loss_mask"}
    assert "tokens ragged int32 elsewhere" in repr(batch)
    with pytest.raises(DataError, match=r"`tokens` .*lies on the ranks that made it: write `batch = await batch.load"):
        _ = batch.tokens
    some = await batch.load("tokens", "rewards")
    assert some.tokens == rollouts().tokens
    assert some.rewards.tolist() == [0, 1, 2, 3]
    assert set(some.elsewhere) == {"prompt", "loss_mask", "sampler_logprobs", "groups"}
    assert travelled(some).elsewhere == batch.elsewhere, "it travels as it came, without its values"
    with pytest.raises(DataError, match="did you mean `tokens`"):
        await batch.load("token")


async def test_pieces_that_are_one_where_they_arrive_are_read_as_before() -> None:
    whole = rollouts(4).only("tokens", "loss_mask")
    batch = Batch.join([whole.hold(Merged, 0), whole.hold(Merged, 0)])
    assert await travelled(batch).load() == Batch.join([whole, whole])
    assert await travelled(batch.select([5, 1])).load() == whole.select([1, 1])


async def test_only_the_pieces_that_hold_the_rows_are_fetched() -> None:
    batch = Batch.join([part.hold(Kept, 0) for part in rollouts(8).only("tokens", "rewards").split(4)])
    Kept.reads.clear()
    assert (await batch.select([3]).load("rewards")).rewards.tolist() == [3]
    assert len(Kept.reads) == 1


def test_columns_elsewhere_are_checked_like_others() -> None:
    batch = rollouts().hold(Kept, 0)
    with pytest.raises(DataError, match="row 0 has 1 tokens and 2 in `versions`"):
        batch.assign(versions=Ragged.of([[0, 0]] * 4, np.int32))
    other = rollouts().drop("prompt").assign(prompt=np.zeros(4)).hold(Kept, 0)
    with pytest.raises(DataError, match="column `prompt` differs between parts: Python values, float64"):
        Batch.concat([batch, other])
    mixed = Batch.concat([batch, rollouts()])
    assert len(mixed) == 8
    assert mixed.select(range(4, 8)).elsewhere == (), "what was here stays here"
