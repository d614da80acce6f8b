"""Log-probabilities over a vocabulary that is split over the ranks of a group. No rank sees all the logits.

Each rank has the logits of the tokens `first` to `first + known`, in the first `known` of its columns. The other
columns pad the vocabulary to a divisible size, and count as tokens of probability zero.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from meshrl_torch.model.network import to_probabilities

if TYPE_CHECKING:
    from collections.abc import Callable


def logprobs(
    logits: Tensor, chosen: Tensor, temperature: Tensor | None, group: ProcessGroup, first: int, known: int
) -> Tensor:
    """Return the log-probability of each chosen token, float32[tokens], the same on all ranks of the group.

    If the logits need a gradient, returns float32[tokens, 2]: also the entropy of the distribution, in nats, without a
    gradient. `logits` is this rank's [tokens, columns] of any dtype, `chosen` int64[tokens] of the whole vocabulary,
    and `temperature` float32[tokens]. The gradient goes to this rank's logits, and is 0 in the columns beyond `known`.
    Each rank must receive the same gradient of the result. On one rank, all bits are those of one log-softmax.
    """
    apply = cast("Callable[[Tensor, Tensor, Tensor | None, ProcessGroup, int, int], Tensor]", _Chosen.apply)
    return apply(logits, chosen, temperature, group, first, known)


class _Chosen(torch.autograd.Function):
    """Holds one float32 tensor in addition to the logits, which the backward pass turns into their gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        chosen: Tensor,
        temperature: Tensor | None,
        group: ProcessGroup,
        first: int,
        known: int,
    ) -> Tensor:
        values = _log_softmax(logits, temperature, group, known)
        mine = (chosen >= first) & (chosen < first + known)
        column = (chosen - first).clamp(0, max(known - 1, 0))[:, None]
        own = values.gather(1, column)[:, 0].where(mine, 0.0) if known else values.new_zeros(len(values))
        if not ctx.needs_input_grad[0]:
            return _sum(own, group)  # all ranks but one add 0
        entropy = to_probabilities(values)
        ctx.save_for_backward(values, column, mine, temperature)
        ctx.dtype, ctx.beyond = logits.dtype, logits.shape[1] - known
        return _sum(torch.stack([own, entropy], 1), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, column, mine, temperature = ctx.saved_tensors
        given = gradients[0][:, 0]
        own = given if temperature is None else given / temperature
        result = probabilities.mul_(-own[:, None])
        if result.shape[1]:
            result.scatter_add_(1, column, own.where(mine, 0.0)[:, None])
        if ctx.beyond:
            result = functional.pad(result, (0, ctx.beyond))
        return result.to(ctx.dtype), None, None, None, None, None


def _sum(values: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, in place."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def _log_softmax(logits: Tensor, temperature: Tensor | None, group: ProcessGroup, known: int) -> Tensor:
    """Return this rank's columns of the log-softmax over the whole vocabulary, float32[tokens, known]."""
    scaled = logits[:, :known]
    if temperature is not None:
        scaled = scaled / temperature[:, None]  # float32, as temperatures are
    own = scaled.log_softmax(-1, dtype=torch.float32)
    if group.size() == 1:
        return own
    # A row of n logits x with maximum x[m] has log-softmax x[m] - logsumexp(x) there. So the fused kernel above has
    # returned the sum of exp(x - x[m]), without a second tensor of this size.
    if known:
        peak, where = scaled.max(-1, keepdim=True)
        told = torch.stack([peak[:, 0].float(), -own.gather(1, where)[:, 0]])
    else:
        told = torch.stack([own.new_full((len(own),), -torch.inf), own.new_zeros(len(own))])
    every = [torch.empty_like(told) for _ in range(group.size())]
    dist.all_gather(every, told, group=group)
    peaks, logs = torch.stack(every, 1)
    highest = peaks.amax(0)
    logsum = (peaks - highest + logs).logsumexp(0)
    return own.add_((told[0] - highest + told[1] - logsum)[:, None])
