"""On one rank, the log-probabilities of the Megatron backend are those of the other backends to the bit."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import Tensor

from meshrl_hf.model import _Chosen
from meshrl_megatron.vocabulary import logprobs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("padding", [0, 5])
def test_one_rank_has_the_bits_of_the_other_backends(dtype: torch.dtype, tempered: bool, padding: int) -> None:
    group = cast("ProcessGroup", SimpleNamespace(size=lambda: 1))
    tokens, vocabulary = 40, 59
    logits = (torch.randn(tokens, vocabulary + padding) * 9).to(dtype)
    chosen, given = torch.randint(vocabulary, (tokens,)), torch.randn(tokens)
    temperature = torch.rand(tokens) + 0.5 if tempered else None
    whole = logits[:, :vocabulary].clone().requires_grad_()
    right = cast("Tensor", _Chosen.apply(whole, chosen, temperature))  # type: ignore[no-untyped-call]
    right[:, 0].backward(given)
    own = logits.requires_grad_()
    values = logprobs(own, chosen, temperature, group, 0, vocabulary)
    values[:, 0].backward(given)
    assert torch.equal(values, right)
    assert own.grad is not None
    assert whole.grad is not None
    assert torch.equal(own.grad[:, :vocabulary], whole.grad)
    assert not own.grad[:, vocabulary:].any()
