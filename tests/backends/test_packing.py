from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from meshrl import Batch, CrossEntropy, PolicyConfig, Ragged
from meshrl.roles import OptimizerConfig
from meshrl_megatron.parts import Part, part_of
from meshrl_megatron.passes import Balance
from meshrl_torch.model import packing
from meshrl_torch.model.attention import Packed
from meshrl_torch.model.mixers import Batches
from meshrl_torch.model.packing import IDLE, MicroBatch, Split, ends, learned, micro_batches, whole
from meshrl_torch.model.scores import Scores
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.material import SHAPE, ModelOf, by_row, changed, floats, norm_of

LONG = packing._WORTH + 6
EIGHT = Balance(per_token=1000.0, per_pair=16.0, fewest=8)
SPLITS: list[Split] = [micro_batches, Balance(per_token=1000.0, per_pair=16.0, fewest=3)]


def branches(random: Random, conversations: int = 4) -> Batch:
    """Rows that go on after the beginning of a row before, or repeat it, or begin anew.

    They learn nothing of what they repeat, or all that the row before learns.
    """
    system = [random.randrange(2, 11) for _ in range(random.choice([1, LONG]))]
    rows: list[tuple[list[int], list[bool]]] = []
    for _ in range(conversations):
        tokens, mask = random.choice(rows) if rows and random.random() < 0.7 else (system, [False] * len(system))
        kept = random.choice([random.randint(len(system), len(tokens)), len(tokens)])
        tokens, mask = tokens[:kept], mask[:kept] if random.random() < 0.5 else [False] * kept
        for _ in range(random.randint(kept == len(system), 3)):
            for learnt in (False, True):
                new = [random.randrange(1, 11) for _ in range(random.choice([1, 4, LONG // 4]))]
                tokens, mask = [*tokens, *new], [*mask, *[learnt] * len(new)]
        rows.append((tokens, mask))
    return Batch.of(
        tokens=Ragged.of([tokens for tokens, _ in rows], np.int32), loss_mask=Ragged.of([m for _, m in rows], np.bool_)
    )


def contexts(micro: MicroBatch) -> list[list[int]]:
    """Of each packed token those that it sees, and itself: which packed tokens they are."""
    total = micro.ids.numel()
    keys = list(range(total)) if micro.attend.keys is None else micro.attend.keys.tolist()
    found: list[list[int]] = []
    at = 0
    for group in micro.attend.groups:
        for _ in range(group.count):
            seen = keys[at : at + group.keys]
            found += [seen[: group.keys - group.queries + query + 1] for query in range(group.queries)]
            at += group.keys
    assert at == len(keys)
    return found


BUDGETS, ASKED = st.sampled_from([100, 300, 2000]), st.sampled_from(["learned", "whole", "ends"])


@given(st.randoms(use_true_random=True), BUDGETS, ASKED, st.booleans(), st.sampled_from(SPLITS))
def test_a_token_is_read_after_those_before(random: Random, budget: int, asked: str, apart: bool, split: Split) -> None:
    batch = branches(random, conversations=6)
    tokens, mask = batch.tokens, batch.loss_mask
    if asked == "learned":
        rows, wanted = learned(tokens, mask, apart=apart), np.flatnonzero(mask.values)
    elif asked == "whole":
        rows = whole(tokens, mask, apart=apart)
        wanted = np.setdiff1d(np.arange(len(tokens.values)), tokens.offsets[:-1])
    else:
        rows, wanted = ends(tokens, np.minimum(tokens.lengths, 8)), tokens.offsets[1:] - 1
    predicted: list[int] = []
    for micro in split(tokens, rows, mask if asked == "learned" else None, budget):
        seen = contexts(micro)
        assert micro.ids.numel() <= max(budget, rows.inputs.max())
        assert micro.positions[0].tolist() == [len(each) - 1 for each in seen]
        assert micro.ids[0].tolist() == tokens.values[micro.read].tolist()
        for source, target in zip(micro.source.tolist(), micro.target.tolist(), strict=True):
            start = tokens.offsets[np.searchsorted(tokens.offsets, target, side="right") - 1]
            read = micro.read[seen[source]]
            assert tokens.values[read].tolist() == tokens.values[start:target].tolist()
            if rows.apart:
                own = int(rows.prefix[rows.starts == start][0])
                assert read[own:].tolist() == list(range(start + own, target)), "of its own row"
        predicted += micro.target.tolist()
    assert sorted(predicted) == wanted.tolist()


def test_what_branches_share_is_read_once() -> None:
    history, apart = list(range(LONG)), packing._WORTH - 1
    rows = [[*history, 1, 2], [*history, 3, 4], [*history[:apart], 5, 6], [*history[:-1], 7, 8]]
    tokens = Ragged.of(rows, np.int32)
    mask = Ragged.of([[*[False] * (len(row) - 2), True, True] for row in rows], np.bool_)
    (micro,) = micro_batches(tokens, learned(tokens, mask), mask, 1000)
    # The first two are a family, the last shares all but a token with it, and the third too little.
    assert micro.ids.numel() == LONG + 2 + (apart + 1) + 1
    (micro,) = micro_batches(tokens, learned(tokens, mask, apart=True), mask, 1000)
    assert micro.ids.numel() == LONG + 2 + (apart + 1) + LONG
    # A part that is small beside the rest of its row is not shared.
    rows = [[*[1] * packing._WORTH, *[other] * packing._WORTH * packing._PARTS] for other in (2, 3)]
    tokens = Ragged.of(rows, np.int32)
    (micro,) = micro_batches(tokens, whole(tokens, None), None, 1000)
    assert micro.attend.keys is None


def test_branches_meet_wherever_they_are_in_the_batch() -> None:
    random = Random(0)
    system, *histories = ([random.randrange(99) for _ in range(size)] for size in (80, 200, 200, 200, 200))
    rows = [[*system, *histories[row % 4], *[100 + row] * 20] for row in range(12)]
    tokens = Ragged.of(rows, np.int32)
    mask = Ragged.of([np.arange(300) >= 281 for _ in rows], np.bool_)  # prompts differ in their last token
    micros = list(micro_batches(tokens, learned(tokens, mask), mask, 450))
    assert [micro.ids.numel() for micro in micros] == [280 + 3 * 19] * 4


async def test_log_probs_and_gradients_are_those_of_each_row_alone(model_of: ModelOf) -> None:
    folder = model_of(LlamaConfig(**changed(SHAPE, max_position_embeddings=256)))
    for seed in range(2):
        batch = branches(Random(seed))
        trainer = TorchPolicy(PolicyConfig(model=folder, optimizer=OptimizerConfig(max_grad_norm=None)))
        network = AutoModelForCausalLM.from_pretrained(folder)
        expected = torch.cat(by_row(network, batch))
        told = floats((await trainer.logprobs(batch)).ragged("logprobs").values)
        np.testing.assert_allclose(told, expected.detach().numpy(), atol=2e-5)
        expected[torch.from_numpy(np.array(batch.loss_mask.values))].mean().neg().backward()
        metrics = await trainer.update(batch, CrossEntropy())
        assert metrics["grad_norm"] == pytest.approx(norm_of(network), rel=1e-5)


def balanced(pairs: Sequence[tuple[int, int]], budget: int) -> list[MicroBatch]:
    """Micro-batches of rows of (prompt number, completion length); prompt `n` has n + 1 tokens."""
    tokens = Ragged.of([np.concatenate([np.full(p + 1, p), np.full(n, 50)]) for p, n in pairs], np.int32)
    mask = Ragged.of([np.arange(p + 1 + n) > p for p, n in pairs], np.bool_)
    return list(EIGHT(tokens, learned(tokens, mask), mask, budget))


def seen_by(part: MicroBatch | Part) -> float:
    groups = part.attend.groups
    return sum(each.count * (each.queries * each.keys - each.queries * (each.queries - 1) / 2) for each in groups)


def work(micro: MicroBatch) -> float:
    return EIGHT.per_token * micro.ids.shape[1] + EIGHT.per_pair * seen_by(micro)


def test_a_pipeline_has_several_micro_batches_of_about_the_same_work_that_read_a_prompt_once_where_it_fits() -> None:
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.uniform(np.log(8), np.log(400), 64)).astype(int).tolist()
    micros = balanced(list(enumerate(lengths)), 1 << 14)
    assert len(micros) == 8
    assert max(map(work, micros)) < 1.05 * np.mean(list(map(work, micros)))
    for budget, sizes in ((4, [8, 8, 8, 8]), (64, [6 + 4 * 2])):  # a prompt of 6, of each row 2 more are read
        assert [micro.ids.shape[1] for micro in balanced([(5, 3)] * 4, budget)] == sizes


HEADS, GROUPS, DIMS = 4, 2, 8


@st.composite
def packings(draw: st.DrawFn) -> list[MicroBatch]:
    prompts = draw(st.lists(st.integers(1, 12), min_size=4, max_size=4))
    rows = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), min_size=1, max_size=8))
    system = draw(st.sampled_from([0, 40]))
    prompts = [system + length for length in prompts]
    return packed(prompts, rows, draw(st.booleans()), system + draw(st.integers(20, 100)), system)


def packed(
    prompts: list[int], rows: list[tuple[int, int]], training: bool, budget: int, system: int = 0
) -> list[MicroBatch]:
    rng = np.random.default_rng(0)
    heads = [np.append(np.ones(system), rng.integers(2, 99, length - system)) for length in prompts]
    tokens = Ragged.of([np.append(heads[head], rng.integers(2, 99, tail)) for head, tail in rows], np.int32)
    mask = Ragged.of([np.arange(prompts[head] + tail) >= prompts[head] for head, tail in rows], np.bool_)
    asked = learned(tokens, mask) if training else whole(tokens, mask)
    return list(micro_batches(tokens, asked, mask if training else None, budget))


def attended(attend: Packed, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
    return attend(0, q, k, v, Scores(DIMS**-0.5))[0]


@settings(max_examples=40)
@given(packings(), st.integers(1, 4), st.integers(1, 4))
@example([IDLE], 2, 1)
@example([IDLE], 4, 3)
def test_ranks_along_cp_together_compute_what_one_computes(micros: list[MicroBatch], ranks: int, multiple: int) -> None:
    for each in micros:
        micro = replace(each, ids=torch.arange(1, each.ids.shape[1] + 1)[None])  # a spare token has the id 0
        parts = [part_of(micro, rank, ranks, multiple) for rank in range(ranks)]
        total = micro.ids.shape[1]
        (size,) = {part.ids.shape[1] for part in parts}
        assert size % multiple == 0
        for part in parts:
            assert part.ids.shape == part.positions.shape
            assert sum(group.count * group.queries for group in part.attend.groups) == size
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


def test_what_rows_share_counts_for_each_row_that_reads_it_again() -> None:
    tokens = Ragged.of([np.append(np.arange(2, 42), [50 + row, 60]) for row in range(6)], np.int32)
    mask = Ragged.of([np.arange(42) >= 40] * 6, np.bool_)
    for repeats, sizes in ((False, [6]), (True, [2, 2, 2])):
        micros = micro_batches(tokens, learned(tokens, mask), mask, 90, repeats=repeats)
        read = [Batches.of(micro.attend, torch.device("cpu")).places for micro in micros]
        assert [sum(len(places) for places in each) for each in read] == sizes


@given(packings())
@example([IDLE])
def test_a_module_that_reads_segments_as_rows_sees_all_that_they_share(micros: list[MicroBatch]) -> None:
    for micro in micros:
        value = torch.randn(micro.ids.shape[1], 1, DIMS)
        nothing = torch.zeros_like(value)
        sums = attended(micro.attend, nothing, nothing, value) * (micro.positions[0, :, None, None] + 1)
        found = Batches.of(micro.attend, value.device).call(
            lambda rows: rows.cumsum(1), (value[None],), {}, [(0,), ("",)]
        )
        torch.testing.assert_close(found, sums[None], rtol=0, atol=1e-4)


@given(st.lists(st.integers(200, 1000), min_size=1, max_size=6), st.integers(2, 4))
def test_ranks_along_cp_attend_to_about_as_many_keys(lengths: list[int], ranks: int) -> None:
    """Pieces of a segment differ by at most a token, which sees at most the segment: so do two ranks, by two tokens."""
    tokens = Ragged.of([np.full(length + 1, row + 2) for row, length in enumerate(lengths)], np.int32)
    (micro,) = micro_batches(tokens, whole(tokens, None), None, 10_000)
    costs = [seen_by(part) for part in (part_of(micro, rank, ranks, 1) for rank in range(ranks))]
    assert max(costs) - min(costs) <= 2 * sum(lengths)
    assert max(costs) <= 1.05 * min(costs)
