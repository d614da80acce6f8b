import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl import Batch, Policy, PolicyConfig, Ragged, Run, RunConfig, at, each
from meshrl.mesh import Rows, limited, routed
from meshrl.roles import Flops, fair_plan
from meshrl.run import MeshConfig
from tests.roles.test_third_party import install

FLOPS = Flops(per_token=1e9, per_pair=1e6)
"""A row of 2,000 tokens costs twice as much as its tokens alone."""


def batch_of(lengths: Sequence[int]) -> Batch:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = Ragged(np.ones(offsets[-1], np.int32), offsets)
    return Batch.of(tokens=tokens, loss_mask=Ragged(np.ones(offsets[-1], np.bool_), offsets))


def heaviest(plan: Sequence[Rows], costs: Rows) -> int:
    return max(int(costs[rows].sum()) for rows in plan)


@given(st.lists(st.integers(0, 20_000), max_size=30), st.integers(1, 9), st.sampled_from([0, 300]))
def test_the_costliest_part_is_never_costlier_than_by_tokens(lengths: list[int], parts: int, window: int) -> None:
    flops = replace(FLOPS, per_near_pair=3e6 if window else 0.0, window=window)
    batch, costs = batch_of(lengths), flops.costs(np.array(lengths, np.int64))
    plan = fair_plan(batch, parts, flops)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(lengths)))
    assert heaviest(plan, costs) <= heaviest(batch.plan(parts), costs)
    assert [rows.tolist() for rows in fair_plan(batch, parts, flops)] == [rows.tolist() for rows in plan]


def test_long_tails_are_divided_more_evenly_than_by_tokens() -> None:
    for parts, seed in itertools.product((2, 4, 8), range(3)):
        lengths = np.minimum(np.random.default_rng(seed).lognormal(7.5, 1.0, 128), 32_000).astype(np.int64)
        batch, costs = batch_of(lengths.tolist()), FLOPS.costs(lengths)
        by_tokens, by_flops = (heaviest(plan, costs) for plan in (batch.plan(parts), fair_plan(batch, parts, FLOPS)))
        bound = max(costs.sum() / parts, costs.max())
        assert by_flops - bound < 0.1 * (by_tokens - bound), (parts, seed)


def test_costs_count_the_tokens_that_each_token_sees() -> None:
    def counted(length: int, window: int) -> int:
        return sum(min(place + 1, window) for place in range(length))

    lengths = np.array([0, 1, 4, 5, 6, 100], np.int64)
    near = Flops(per_token=1.0, per_pair=2.0, per_near_pair=3.0, window=5)
    expected = [n + 2 * counted(n, n) + 3 * counted(n, 5) for n in lengths.tolist()]
    assert near.costs(lengths).tolist() == [1024 * each for each in expected]


FILES = {
    "counting-1.0.dist-info/METADATA": "Name: counting\nVersion: 1.0\n",
    "counting-1.0.dist-info/entry_points.txt": "[meshrl.backends]\ncounting = meshrl_counting\n",
    "meshrl_counting.py": """
from meshrl.roles import Flops
ROLES = {"Policy": "meshrl.testing:FakePolicy"}
MODELS = "ignored"
FLOPS = "meshrl_counting:count"

def count(config):
    return Flops(per_token=1.0, per_pair=1.0)
""",
}


async def test_a_role_divides_calls_by_what_its_backend_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(FILES, tmp_path / "site", monkeypatch)
    monkeypatch.chdir(tmp_path)
    batch = batch_of([4, 4, 4, 4, 8, 8])

    async def lengths(policy: Policy) -> list[list[int]]:
        return [part.lengths.tolist() for part in await each(policy.logprobs)(batch)]

    async with Run(RunConfig(name="divided", meshes={"main": MeshConfig(ranks=2)})) as run:
        by_tokens = await run.spawn(Policy, PolicyConfig(backend="counting", model="none"))
        assert await lengths(by_tokens) == [[4, 4, 4, 4], [8, 8]]
        policy = await run.spawn(Policy, PolicyConfig(backend="counting", model="none", balance="flops"))
        # A row of 4 tokens takes 4 + 10 operations, and one of 8 takes 8 + 36.
        assert await lengths(policy) == await lengths(limited(policy, 60)) == [[4, 4, 8], [4, 4, 8]]
        receive, sent = cast("tuple[Any, Any]", policy.__reduce__())
        assert await lengths(receive(*sent)) == [[4, 4, 8], [4, 4, 8]]  # as another actor gets it
        assert (await policy.logprobs(batch)).lengths.tolist() == [4, 4, 4, 4, 8, 8]
        chosen = await each(routed(policy.logprobs, np.zeros(6, np.int64)))(batch)
        assert [len(part) for part in chosen] == [6, 0]
        assert len(await at(policy, dp=0).logprobs(batch)) == 6
        fake = await run.spawn(Policy, PolicyConfig(backend="fake", model="none", balance="flops"))
        assert await lengths(fake) == [[4, 4, 4, 4], [8, 8]]  # this one counts nothing
