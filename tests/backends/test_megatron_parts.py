"""What a rank along `cp` computes of a packed micro-batch: every token once, and all of them what one rank computes."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshrl import Ragged
from meshrl_hf.attention import Packed
from meshrl_hf.packing import IDLE, MicroBatch, learned, micro_batches, whole
from meshrl_megatron.parts import Part, part_of

HEADS, GROUPS, DIMS = 4, 2, 8

Pairs = list[tuple[int, int]]
"""By row: which of four prompts it has, and how many tokens follow."""


@st.composite
def packings(draw: st.DrawFn) -> list[MicroBatch]:
    """Micro-batches of rows with shared prompts, for training and for scoring, and perhaps a system message of all."""
    prompts = draw(st.lists(st.integers(1, 12), min_size=4, max_size=4))
    rows = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=8))
    system = draw(st.sampled_from([0, 40]))
    prompts = [system + length for length in prompts]
    return packed(
        prompts, rows, training=draw(st.booleans()), budget=system + draw(st.integers(20, 100)), system=system
    )


def packed(prompts: list[int], rows: Pairs, *, training: bool, budget: int = 1000, system: int = 0) -> list[MicroBatch]:
    rng = np.random.default_rng(0)
    heads = [np.append(np.ones(system), rng.integers(2, 99, length - system)) for length in prompts]
    tokens = Ragged.of([np.append(heads[head], rng.integers(2, 99, tail)) for head, tail in rows], np.int32)
    mask = Ragged.of([np.arange(prompts[head] + tail) >= prompts[head] for head, tail in rows], np.bool_)
    asked = learned(tokens, mask) if training else whole(tokens, mask)
    return list(micro_batches(tokens, asked, mask if training else None, budget))


def parts_of(micro: MicroBatch, ranks: int, multiple: int) -> list[Part]:
    return [part_of(micro, rank, ranks, multiple) for rank in range(ranks)]


def attended(attend: Packed, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[tokens, heads, dims] from the same."""
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    return attend(0, q, k, v, DIMS**-0.5, None)[0]


def numbered(micro: MicroBatch) -> MicroBatch:
    """The same, whose ids number its tokens from 1 on: a spare token has the id 0."""
    ids = torch.arange(1, micro.ids.shape[1] + 1)[None]
    return replace(micro, ids=ids)


@settings(max_examples=40)
@given(packings(), st.integers(1, 4), st.integers(1, 4))
@example([IDLE], 2, 1)
@example([IDLE], 4, 3)
def test_ranks_together_compute_what_one_computes(micros: list[MicroBatch], ranks: int, multiple: int) -> None:
    for micro in map(numbered, micros):
        parts = parts_of(micro, ranks, multiple)
        total = micro.ids.shape[1]
        sizes = {part.ids.shape[1] for part in parts}
        assert len(sizes) == 1
        assert sizes.pop() % multiple == 0
        for part in parts:
            assert part.ids.shape == part.positions.shape
            assert sum(group.count * group.queries for group in part.attend.groups) == part.ids.shape[1]
            assert part.targets == len(micro.target)

        # Each token once, at its position, and each target once, by the token that predicts it.
        own = [part.ids[0] - 1 for part in parts]
        real = torch.cat(own)
        assert sorted(real[real >= 0].tolist()) == list(range(total))
        targets = torch.cat([part.target for part in parts])
        assert sorted(targets.tolist()) == list(range(len(micro.target)))
        for part, ids in zip(parts, own, strict=True):
            assert torch.equal(part.positions[0], torch.where(ids >= 0, micro.positions[0][ids], 0))
            assert torch.equal(ids[part.source], micro.source[part.target])

        # The attention of all, as each rank has it from the states of all.
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(total, heads, DIMS, generator=generator) for heads in (HEADS, GROUPS, GROUPS))
        # A spare token's key and value are none of the others' business.
        keys, values = (torch.where(real[:, None, None] >= 0, each[real], torch.nan) for each in (key, value))
        expected = attended(micro.attend, query, key, value)
        for part, ids in zip(parts, own, strict=True):
            found = attended(part.attend, query[ids], keys, values)
            torch.testing.assert_close(found[ids >= 0], expected[ids[ids >= 0]], rtol=0, atol=1e-6)


def pairs(part: Part) -> int:
    """How many keys the queries of a rank see, all together."""
    return sum(
        group.count * (group.queries * (group.keys - group.queries) + group.queries * (group.queries + 1) // 2)
        for group in part.attend.groups
    )


@given(st.lists(st.integers(200, 1000), min_size=1, max_size=6), st.integers(2, 4))
def test_ranks_attend_to_about_as_many_keys(lengths: list[int], ranks: int) -> None:
    """Pieces of a segment differ by at most a token, which sees at most the segment: so do two ranks, by two tokens."""
    (micro,) = packed([1, 1, 1, 1], [(0, length) for length in lengths], training=False, budget=10_000)
    costs = [pairs(part) for part in parts_of(micro, ranks, 1)]
    assert max(costs) - min(costs) <= 2 * sum(lengths)
    assert max(costs) <= 1.05 * min(costs)
