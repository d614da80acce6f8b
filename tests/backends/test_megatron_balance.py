"""Micro-batches of about the same work."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshrl.data import Ragged
from meshrl_hf.packing import MicroBatch, learned
from meshrl_megatron.balance import Balance

BALANCE = Balance(per_token=1000.0, per_pair=16.0, fewest=8)


def divided(lengths: list[int], prompts: list[int], budget: int) -> tuple[list[MicroBatch], Ragged]:
    """Micro-batches of rows of (prompt number, completion length), and what they learn; prompt `n` has n + 1 tokens."""
    pairs = list(zip(prompts, lengths, strict=True))
    tokens = Ragged.of([np.concatenate([np.full(p + 1, p), np.full(n, 50)]) for p, n in pairs], np.int32)
    mask = Ragged.of([np.arange(p + 1 + n) > p for p, n in pairs], np.bool_)
    return list(BALANCE(tokens, learned(tokens, mask), mask, budget)), mask


@given(
    pairs=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=40),
    budget=st.integers(1, 120),
)
def test_each_target_stands_in_one_micro_batch_of_at_most_the_budget(pairs: list[tuple[int, int]], budget: int) -> None:
    micros, mask = divided([length for length, _ in pairs], [prompt for _, prompt in pairs], budget)
    targets = [target for micro in micros for target in micro.target.tolist()]
    assert sorted(targets) == np.flatnonzero(mask.values).tolist()
    longest = max((prompt + length for length, prompt in pairs), default=0)  # its last token is not read
    assert all(micro.ids.shape[1] <= max(budget, longest) for micro in micros)


def work(micro: MicroBatch) -> float:
    groups = micro.attend.groups
    seen = [each.count * (each.queries * each.keys - each.queries * (each.queries - 1) / 2) for each in groups]
    return BALANCE.per_token * micro.ids.shape[1] + BALANCE.per_pair * sum(seen)


def test_a_pipeline_has_several_micro_batches_of_about_the_same_work() -> None:
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.uniform(np.log(8), np.log(400), 64)).astype(int).tolist()
    micros, _ = divided(lengths, list(range(64)), 1 << 14)
    assert len(micros) == 8
    assert max(map(work, micros)) < 1.05 * np.mean(list(map(work, micros)))


def test_a_family_reads_its_prompt_once_where_it_fits() -> None:
    for budget, sizes in ((4, [8, 8, 8, 8]), (64, [6 + 4 * 2])):  # a prompt of 6, of each row 2 more are read
        micros, _ = divided([3, 3, 3, 3], [5, 5, 5, 5], budget)
        assert [micro.ids.shape[1] for micro in micros] == sizes
