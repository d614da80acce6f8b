"""Mini-batches: every row once an epoch, in an order that the seed decides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.algo import minibatches
from meshrl.data import Batch, Ragged
from meshrl.errors import DataError


def drawn(rows: int, epochs: int, count: int, seed: int | tuple[int, ...]) -> list[list[int]]:
    return [part.groups.tolist() for part in minibatches(Batch.of(groups=np.arange(rows)), epochs, count, seed)]


@given(st.integers(0, 30), st.integers(1, 3), st.integers(1, 9), st.integers(0, 99))
def test_each_row_comes_once_an_epoch(rows: int, epochs: int, count: int, seed: int) -> None:
    found = drawn(rows, epochs, count, seed)
    parts = min(rows, count)
    assert len(found) == epochs * parts
    for epoch in range(epochs):
        own = found[epoch * parts : (epoch + 1) * parts]
        assert sorted(row for part in own for row in part) == list(range(rows))
        assert {len(part) for part in own} <= {rows // max(1, parts), -(-rows // max(1, parts))}
        assert all(part == sorted(part) for part in own), "within a mini-batch rows keep their order"


def test_the_seed_decides_which_rows_meet_and_epochs_differ() -> None:
    found = drawn(40, 2, 4, (7, 3))
    assert found == drawn(40, 2, 4, (7, 3))
    assert found != drawn(40, 2, 4, (7, 4))
    assert found[:4] != found[4:]


@given(st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=12), st.integers(1, 5))
def test_no_mini_batch_has_nothing_to_learn(masks: list[list[bool]], count: int) -> None:
    batch = Batch.of(groups=np.arange(len(masks)), loss_mask=Ragged.of(masks, np.bool_))
    learned = [row for row, mask in enumerate(masks) if any(mask)]
    if not learned:
        with pytest.raises(DataError, match=f"nothing to learn: `loss_mask` is False for all tokens of {len(masks)}"):
            list(minibatches(batch, 1, count, 0))
        return
    parts = [part.groups.tolist() for part in minibatches(batch, 2, count, 0)]
    assert len(parts) == 2 * min(count, len(learned))
    assert sorted(row for part in parts for row in part) == sorted(learned * 2)


def test_none_is_refused() -> None:
    for epochs, count in ((0, 1), (1, 0)):
        with pytest.raises(DataError, match=f"{epochs} epochs of {count} mini-batches"):
            drawn(3, epochs, count, 0)
