"""Attention with caps and sinks, made in blocks, against all scores at once in float64."""

import math

import pytest
import torch
from torch import Tensor

from meshrl_torch.estimate import rehearsal
from meshrl_torch.model import scores
from meshrl_torch.model.attention import Group, Packed
from meshrl_torch.model.scores import Scores

GROUPS = (Group(2, 9, 9), Group(1, 5, 12))
"""Segments, and one whose first tokens are another's."""
KEYS = torch.tensor([*range(18), *range(7), *range(18, 23)])


def at_once(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, how: Scores) -> Tensor:
    key, value = (each[0].repeat_interleave(2, 0)[:, KEYS] for each in (key, value))
    outputs, start, first = list[Tensor](), 0, 0
    for queries, keys in ((9, 9), (9, 9), (5, 12)):
        own = query[0, :, start : start + queries] @ key[:, first : first + keys].mT * how.scale
        own = own if how.cap is None else how.cap * torch.tanh(own / how.cap)
        for row in range(queries):
            at = keys - queries + row
            for other in range(keys):
                chunk = how.chunk or keys
                if other > at or at - other >= (how.window or keys) or other // chunk != at // chunk:
                    own[:, row, other] = -math.inf
        weights = own.exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
        outputs.append(weights / total @ value[:, first : first + keys])
        start, first = start + queries, first + keys
    return torch.cat(outputs, 1).transpose(0, 1)[None]


@pytest.mark.parametrize("bounds", [{}, {"window": 4}, {"chunk": 5}])
@pytest.mark.parametrize(("cap", "has_sinks"), [(0.7, False), (None, True), (0.7, True)])
def test_blocks_of_queries_compute_what_all_scores_do(
    bounds: dict[str, int], cap: float | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "MOST", 64)
    random = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, 23, dims, generator=random) for heads, dims in ((4, 8), (2, 8), (2, 6))]
    states += [torch.randn(4, generator=random)] * has_sinks
    given = torch.randn(1, 23, 4, 6, generator=random)
    results: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        own = [each.to(dtype).requires_grad_() for each in states]
        sinks = own[3] if has_sinks else None
        how = Scores(0.4, cap=cap, sinks=sinks, **bounds)
        if dtype == torch.float32:
            output = Packed(GROUPS, KEYS)(0, own[0], own[1], own[2], how)
        else:
            output = at_once(own[0], own[1], own[2], sinks, how)
        results.append([output, *torch.autograd.grad(output, own, given.to(dtype))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)


def test_memory_is_that_of_a_block() -> None:
    heads, tokens = 16, 3072
    with rehearsal.fake.FakeTensorMode(), rehearsal.LiveBytes() as live:
        query, key, value = (torch.empty(1, heads, tokens, 8, requires_grad=True) for _ in range(3))
        Packed((Group(1, tokens, tokens),))(0, query, key, value, Scores(1.0, cap=30.0)).sum().backward()
        assert live.peak() < 8 * scores.MOST * 4 < heads * tokens**2 * 4
