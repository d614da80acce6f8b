"""Where log-probs come from: a token column knows what computed it wherever its rows go, and a loss refuses others."""

import pickle
import re
from collections.abc import Callable
from typing import TypeVar, cast

import ml_dtypes
import numpy as np
import pytest

from meshrl.algo import ClippedLoss, Correction, CrossEntropy, check_sources
from meshrl.data import Batch, Column, Ragged, Source
from meshrl.errors import DataError
from tests.data.test_remote_column import Kept

T = TypeVar("T")
SAMPLER, REFERENCE, TRAINER = Source("sampler"), Source("reference"), Source.trainer(3)


def scored(**sources: Source | None) -> Batch:
    lengths = range(1, 4)
    columns: dict[str, Column] = {
        name: Ragged.of([np.zeros(n) for n in lengths], np.float32, source=source) for name, source in sources.items()
    }
    return Batch.of(tokens=Ragged.of([np.arange(n) for n in lengths], np.int32), **columns)


def pickled(value: T) -> T:
    return cast("T", pickle.loads(pickle.dumps(value, 5)))  # noqa: S301 -- its own


def elsewhere(batch: Batch) -> Batch:
    return batch.hold(Kept, 0)


JOURNEYS: dict[str, Callable[[Batch], Batch]] = {
    "selecting": lambda batch: batch.select([2, 0]),
    "repeating": lambda batch: batch.repeat(2),
    "splitting and joining": lambda batch: Batch.join(batch.split(2)),
    "joining with itself": lambda batch: Batch.concat([batch, batch]),
    "pickling": pickled,
    "the wire": lambda batch: Batch.from_wire(*batch.to_wire()),
    "sharing offsets": lambda batch: Batch(dict(batch.columns)),
    "a standard dtype": lambda batch: Batch.of(
        sampler_logprobs=Ragged(batch.ragged("logprobs").values.astype(np.float64), [0, 1, 3, 6], source=SAMPLER)
    ),
    "staying elsewhere": lambda batch: pickled(elsewhere(batch)),
    "rows elsewhere": lambda batch: elsewhere(batch).select([2, 1]),
    "parts elsewhere": lambda batch: Batch.join([elsewhere(part) for part in batch.split(2)]),
    "parts here and elsewhere": lambda batch: Batch.concat([batch, elsewhere(batch)]),
}


async def test_the_source_goes_where_the_rows_go() -> None:
    for name, journey in JOURNEYS.items():
        batch = journey(scored(logprobs=SAMPLER))
        column = batch.names[-1]
        assert batch.source(column) == SAMPLER, name
        assert (await batch.load()).ragged(column).source == SAMPLER, name


def test_a_column_by_itself_carries_it() -> None:
    column = Ragged.of([[0.5], []], ml_dtypes.bfloat16, source=TRAINER)
    assert column.select(np.array([1, 0])).source == TRAINER
    assert pickled(column).source == TRAINER
    assert Ragged(np.exp(column.values), column.offsets).source is None, "computed anew"
    assert column == Ragged(column.values, column.offsets), "no part of equality"


def test_it_is_shown() -> None:
    assert repr(scored(logprobs=TRAINER).ragged("logprobs")) == "Ragged(3 rows, float32[6] by trainer@3)"
    batch = scored(logprobs=SAMPLER)
    assert repr(batch) == "Batch(3 rows, 6 tokens: tokens ragged int32, logprobs ragged float32 by sampler)"
    assert repr(elsewhere(batch)).endswith("logprobs ragged float32 by sampler elsewhere)")
    assert str(Source("trainer", 3, 5)) == "trainer@3-5"


@pytest.mark.parametrize("held", [False, True])
async def test_trainers_of_several_versions_join_to_the_range_and_different_models_do_not(held: bool) -> None:
    def joined(*sources: Source | None) -> Batch:
        parts = [scored(logprobs=source) for source in sources]
        return Batch.concat([elsewhere(part) if held else part for part in parts])

    batch = joined(Source.trainer(4), Source("trainer", 7, 9), Source.trainer(5))
    assert batch.source("logprobs") == Source("trainer", 4, 9)
    one = await batch.select([0, 1, 2]).load()
    assert one.source("logprobs") == one.ragged("logprobs").source == Source("trainer", 4, 9), "not narrowed"
    for parts in (None, Source.trainer(4), Source("trainer", 7, 9)), (Source("trainer", 4, 9), Source.trainer(5), None):
        assert joined(*parts).source("logprobs") == Source("trainer", 4, 9), "what is known of any part, in any order"
    assert joined(None, None).source("logprobs") is None
    for role in (SAMPLER, REFERENCE):
        with pytest.raises(DataError, match=f"`logprobs` was computed by the {role} in one part and by the trainer"):
            joined(role, None, Source.trainer(1))


PENALISED = ClippedLoss(anchor="trainer", kl=0.1)


def test_log_probs_of_the_models_a_loss_asks_for_are_taken() -> None:
    corrected = ClippedLoss(anchor="trainer", kl=0.1, correction=Correction(level="sequence", high=2.0))
    check_sources(scored(sampler_logprobs=SAMPLER, logprobs=TRAINER, reference_logprobs=REFERENCE), corrected)
    check_sources(scored(sampler_logprobs=None, logprobs=None, reference_logprobs=None), corrected)
    check_sources(scored(sampler_logprobs=SAMPLER, logprobs=SAMPLER), ClippedLoss())
    check_sources(scored(), CrossEntropy())
    check_sources(scored(sampler_logprobs=SAMPLER, logprobs=TRAINER), ClippedLoss(anchor="trainer"), 3)


def test_log_probs_of_another_model_are_refused() -> None:
    for sampler, trainer, reference, message in (
        (SAMPLER, SAMPLER, REFERENCE, "the batch's were computed by the sampler: call `batch = await policy."),
        (TRAINER, TRAINER, REFERENCE, "ClippedLoss reads `sampler_logprobs`, which must come from the sampler"),
        (None, TRAINER, TRAINER, "call `batch = await reference.logprobs(batch)` before the update"),
        (SAMPLER, Source("trainer", 1, 4), REFERENCE, "at version 4, and this policy is at version 3"),
    ):
        batch = scored(sampler_logprobs=sampler, logprobs=trainer, reference_logprobs=reference)
        with pytest.raises(DataError, match=re.escape(message)):
            check_sources(batch, PENALISED, 3)
    lacks = "ClippedLoss reads `reference_logprobs`, which the batch does not have: call `batch = await reference"
    with pytest.raises(DataError, match=lacks):
        check_sources(scored(sampler_logprobs=SAMPLER, logprobs=TRAINER), PENALISED, 3)
    no_tokens: list[Column] = [np.zeros(3, np.float32), tuple([0.0, -1.0] for _ in range(3))]
    for column in no_tokens:
        batch = scored(sampler_logprobs=SAMPLER).assign(logprobs=column)
        with pytest.raises(DataError, match="reads `logprobs` of each token, but the batch's is not a token column"):
            check_sources(batch, ClippedLoss(anchor="trainer"), 3)


def test_joining_with_rows_of_an_unknown_source_makes_nothing_acceptable() -> None:
    known, unknown, later = (
        scored(sampler_logprobs=SAMPLER, logprobs=source) for source in (SAMPLER, None, Source.trainer(4))
    )
    for first, second in (known, unknown), (unknown, known), (later, unknown), (unknown, later):
        with pytest.raises(DataError, match="ClippedLoss reads `logprobs`, which"):
            check_sources(Batch.concat([first, second]), ClippedLoss(anchor="trainer"), 3)
