"""Log-probabilities of a vocabulary that 1, 2 and 4 processes share: one process's in float64, and their gradients."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import spawn

from meshrl_megatron.vocabulary import logprobs

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


def check_all(rank: int, folder: str) -> None:
    """In each of 4 processes: alone, in pairs, all together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    for size, columns in COLUMNS.items():
        group = dist.new_subgroups(size)[0]
        assert isinstance(group, ProcessGroup)
        for dtype in (torch.float32, torch.bfloat16):
            check(group, dtype, tempered=False)
            check(group, dtype, tempered=True)
        none = torch.empty(0, columns)
        assert logprobs(none, torch.empty(0, dtype=torch.int64), None, group, 0, 1).shape == (0,)
    dist.destroy_process_group()


def test_ranks_that_split_the_vocabulary_get_what_one_has(tmp_path: Path) -> None:
    spawn(check_all, (str(tmp_path),), nprocs=4)
