"""Log-probabilities of a vocabulary that 1, 2 and 4 ranks share: one process's in float64, and their gradients."""

from collections.abc import Awaitable, Callable
from itertools import product

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshrl import Actor, Mesh, current_rank, endpoint
from meshrl_megatron.vocabulary import logprobs
from meshrl_megatron.world import World
from tests.backends.material import RANKS_OF_MEGATRON

pytestmark = RANKS_OF_MEGATRON

TOKENS, VOCABULARY = 6, 11
COLUMNS = {1: 12, 2: 6, 4: 4}
"""Of each rank: 4 ranks have room for 16 tokens, so the last one knows none."""


def part(logits: Tensor, first: int, columns: int) -> Tensor:
    """A rank's columns of the logits, those beyond the vocabulary the highest of all."""
    own = logits[:, first : first + columns]
    padded = torch.full((len(logits), columns), 1e4, dtype=logits.dtype)
    padded[:, : own.shape[1]] = own
    return padded.requires_grad_()


def check(group: ProcessGroup, dtype: torch.dtype, tempered: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(TOKENS, VOCABULARY, generator=generator) * 9).to(dtype)
    temperature = torch.rand(TOKENS, generator=generator) + 0.5 if tempered else None
    given = torch.randn(TOKENS, generator=generator)
    chosen, rows = torch.tensor([0, 5, 10, 6, 3, 3]), torch.arange(TOKENS)
    whole = logits.double().requires_grad_()
    right = (whole if temperature is None else whole / temperature[:, None]).log_softmax(-1)
    right[rows, chosen].backward(given.double())
    assert whole.grad is not None

    columns = COLUMNS[group.size()]
    first = group.rank() * columns
    known = max(0, min(columns, VOCABULARY - first))
    own = part(logits, first, columns)
    told = logprobs(own, chosen, temperature, group, first, known)
    values, entropy = told.unbind(1)
    values.backward(given)
    assert values.dtype == torch.float32
    assert own.grad is not None
    torch.testing.assert_close(values.double(), right[rows, chosen], rtol=2e-7, atol=2e-6)
    rounding = 2e-6 if dtype == torch.float32 else 4e-3
    slopes = whole.grad[:, first : first + columns]
    torch.testing.assert_close(own.grad[:, :known].double(), slopes, rtol=rounding, atol=1e-6)
    assert not own.grad[:, known:].any()
    torch.testing.assert_close(entropy.double(), -(right.exp() * right).sum(-1), rtol=0, atol=2e-6)
    with torch.no_grad():
        assert torch.equal(logprobs(own.detach(), chosen, temperature, group, first, known), values)


class Sharer(Actor):
    """A rank that has a part of the vocabulary."""

    def __init__(self) -> None:
        self._group = World.of(current_rank(), 1, 1).groups.tp

    @endpoint
    async def check(self) -> None:
        for dtype, tempered in product((torch.float32, torch.bfloat16), (False, True)):
            check(self._group, dtype, tempered)
        none = torch.empty(0, COLUMNS[self._group.size()])
        assert logprobs(none, torch.empty(0, dtype=torch.int64), None, self._group, 0, 1).shape == (0,)


async def test_ranks_that_share_the_vocabulary_get_what_one_has(warm: Callable[[int], Awaitable[Mesh]]) -> None:
    four = await warm(4)
    for size in COLUMNS:
        await (await four.shape(dp=4 // size, tp=size).spawn(Sharer)).check()
