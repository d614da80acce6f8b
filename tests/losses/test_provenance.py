"""Where log-probs come from: a token column knows what computed it, wherever its rows go."""

import pickle
from collections.abc import Callable, Sequence
from random import Random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.data import Batch, Ragged, Source
from meshrl.data.provenance import joined
from meshrl.errors import DataError
from meshrl.mesh import Ref

SAMPLER, REFERENCE = Source("sampler"), Source("reference")


def scored(source: Source | None, rows: int = 3) -> Batch:
    """Rows of 1, 2, ... tokens with `logprobs` by the source."""
    lengths = range(1, rows + 1)
    return Batch.of(
        tokens=Ragged.of([np.arange(n) for n in lengths], np.int32),
        logprobs=Ragged.of([np.zeros(n) for n in lengths], np.float32, source=source),
    )


class Kept(Ref):
    """A held value; it is pickled whole, as if its rank were always there."""

    def __init__(self, value: object) -> None:
        self.value = value

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        return [each.value for each in held if isinstance(each, Kept)]


def through_pickle(batch: Batch) -> Batch:
    again = pickle.loads(pickle.dumps(batch, 5))  # noqa: S301 -- its own
    assert isinstance(again, Batch)
    return again


JOURNEYS: dict[str, Callable[[Batch], Batch]] = {
    "selecting": lambda batch: batch.select([2, 0]),
    "repeating": lambda batch: batch.repeat(2),
    "splitting and joining": lambda batch: Batch.join(batch.split(2)),
    "joining with itself": lambda batch: Batch.concat([batch, batch]),
    "pickling": through_pickle,
    "the wire": lambda batch: Batch.from_wire(*batch.to_wire()),
    "sharing offsets": lambda batch: Batch(dict(batch.columns)),
    "a standard dtype": lambda batch: Batch.of(
        sampler_logprobs=Ragged(batch.ragged("logprobs").values.astype(np.float64), [0, 1, 3, 6], source=SAMPLER)
    ),
    "staying elsewhere": lambda batch: through_pickle(batch.hold(Kept, 0)),
    "rows elsewhere": lambda batch: batch.hold(Kept, 0).select([2, 1]),
    "parts elsewhere": lambda batch: Batch.join([part.hold(Kept, 0) for part in batch.split(2)]),
    "parts here and elsewhere": lambda batch: Batch.concat([batch, batch.hold(Kept, 0)]),
}


@pytest.mark.parametrize("journey", JOURNEYS.values(), ids=JOURNEYS)
async def test_the_source_goes_where_the_rows_go(journey: Callable[[Batch], Batch]) -> None:
    batch = journey(scored(SAMPLER))
    name = batch.names[-1]
    assert batch.source(name) == SAMPLER
    assert (await batch.load()).ragged(name).source == SAMPLER


def test_a_column_by_itself_carries_it() -> None:
    column = Ragged.of([[0.5], []], ml_dtypes.bfloat16, source=Source.trainer(3))
    assert column.select(np.array([1, 0])).source == Source.trainer(3)
    again: object = pickle.loads(pickle.dumps(column, 4))  # noqa: S301 -- its own
    assert isinstance(again, Ragged)
    assert again.source == Source.trainer(3)
    assert Ragged(np.exp(column.values), column.offsets).source is None, "computed anew"
    assert column == Ragged(column.values, column.offsets), "no part of equality"


def test_it_is_shown() -> None:
    assert repr(scored(Source.trainer(3)).ragged("logprobs")) == "Ragged(3 rows, float32[6] by trainer@3)"
    assert repr(scored(SAMPLER)) == "Batch(3 rows, 6 tokens: tokens ragged int32, logprobs ragged float32 by sampler)"
    assert repr(scored(SAMPLER).hold(Kept, 0)).endswith("logprobs ragged float32 by sampler elsewhere)")
    assert str(Source("trainer", 3, 5)) == "trainer@3-5"


@pytest.mark.parametrize("held", [False, True])
async def test_trainers_of_several_versions_join_to_the_range(held: bool) -> None:
    parts = [scored(Source.trainer(4)), scored(Source("trainer", 7, 9)), scored(Source.trainer(5))]
    batch = Batch.concat([part.hold(Kept, 0) for part in parts] if held else parts)
    assert batch.source("logprobs") == Source("trainer", 4, 9)
    one = await batch.select([0, 1, 2]).load()
    assert one.source("logprobs") == one.ragged("logprobs").source == Source("trainer", 4, 9), "not narrowed"


@pytest.mark.parametrize("held", [False, True])
def test_columns_of_different_models_do_not_join(held: bool) -> None:
    parts = [scored(SAMPLER), scored(None), scored(Source.trainer(1))]
    if held:
        parts = [part.hold(Kept, 0) for part in parts]
    with pytest.raises(DataError, match="`logprobs` was computed by the sampler in one part and by the trainer"):
        Batch.concat(parts)


SOURCES = st.one_of(
    st.none(),
    st.just(REFERENCE),
    st.builds(lambda low, more: Source("trainer", low, low + more), st.integers(0, 9), st.integers(0, 9)),
)


@given(st.lists(SOURCES, min_size=1), st.randoms(use_true_random=False))
def test_joining_keeps_what_is_known_of_any_part_in_any_order(parts: list[Source | None], random: Random) -> None:
    roles = {part.role for part in parts if part}
    if len(roles) > 1:
        with pytest.raises(DataError, match="by the reference in one part and by the trainer in another"):
            joined("x", parts)
        return
    whole = joined("x", parts)
    assert (whole.role if whole else None) == (roles.pop() if roles else None)
    for part in parts:
        if whole and part and part.oldest is not None and part.newest is not None:
            assert whole.oldest is not None
            assert whole.newest is not None
            assert whole.oldest <= part.oldest <= part.newest <= whole.newest
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert joined("x", shuffled) == whole
