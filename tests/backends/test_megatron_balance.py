"""Micro-batches of about the same work."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.data import Ragged
from meshrl_hf.packing import learned
from meshrl_megatron.balance import Balance

BALANCE = Balance(per_token=1000.0, per_pair=16.0, fewest=8)


def column(lengths: list[int], prompts: list[int]) -> tuple[Ragged, Ragged]:
    """Rows of (prompt number, completion length); prompt `n` has n + 1 tokens."""
    tokens = [np.concatenate([np.full(p + 1, p), np.full(n, 50)]) for p, n in zip(prompts, lengths, strict=True)]
    masks = [np.arange(p + 1 + n) > p for p, n in zip(prompts, lengths, strict=True)]
    return Ragged.of(tokens, np.int32), Ragged.of(masks, np.bool_)


@given(
    pairs=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=40),
    budget=st.integers(1, 120),
)
def test_each_target_stands_in_one_micro_batch_of_at_most_the_budget(pairs: list[tuple[int, int]], budget: int) -> None:
    tokens, mask = column([length for length, _ in pairs], [prompt for _, prompt in pairs])
    micros = list(BALANCE(tokens, learned(tokens, mask), mask, budget))
    targets = np.sort(np.concatenate([micro.target for micro in micros]))
    assert targets.tolist() == np.flatnonzero(mask.values).tolist()
    longest = max(prompt + length for length, prompt in pairs)  # its last token is not read
    assert all(micro.ids.shape[1] <= max(budget, longest) for micro in micros)


def test_a_pipeline_has_several_micro_batches_of_about_the_same_work() -> None:
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.uniform(np.log(8), np.log(400), 64)).astype(int).tolist()
    tokens, mask = column(lengths, list(range(64)))
    rows = learned(tokens, mask)
    parts = BALANCE._parts(rows, 1 << 14)
    assert len(parts) == 8
    work = [sum(BALANCE.work(rows, part[i : i + 1]) for i in range(len(part))) for part in parts]
    assert max(work) < 1.05 * np.mean(work)


def test_no_rows_make_no_micro_batch() -> None:
    tokens, mask = column([], [])
    assert list(BALANCE(tokens, learned(tokens, mask), mask, 10)) == []


@pytest.mark.parametrize("budget", [4, 64])
def test_a_family_reads_its_prompt_once_where_it_fits(budget: int) -> None:
    tokens, mask = column([3, 3, 3, 3], [5, 5, 5, 5])  # a prompt of 6, of each row 2 more are read
    micros = list(BALANCE(tokens, learned(tokens, mask), mask, budget))
    assert [micro.ids.shape[1] for micro in micros] == ([8, 8, 8, 8] if budget == 4 else [6 + 4 * 2])
