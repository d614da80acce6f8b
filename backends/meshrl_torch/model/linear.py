"""Large linear layers, whose float32 products oneDNN computes. MKL, torch's choice, uses AVX-512 on Intel's alone.

oneDNN needs some 30 microseconds before it multiplies, which is more than a whole product of a small layer takes.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn

_Compute: TypeAlias = Callable[..., Tensor]
_LARGE: Final = 1 << 17
"""Elements of a weight from which oneDNN multiplies."""


class _Linear(nn.Linear):
    """A linear layer with the numbers of torch's own, up to twice as fast on AVX-512 processors of other makers."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- as torch calls it
        """Return float32[..., out] from float32[..., in] on CPUs, and else what torch's own layer does."""
        if torch.compiler.is_compiling():  # it does not take classes with a backward pass of their own
            return super().forward(input)
        kinds = {(each.device.type, each.dtype) for each in (input, self.weight)}
        plain = type(self.weight) is nn.Parameter and self.weight.is_contiguous()
        if not plain or kinds != {("cpu", torch.float32)} or not input.numel():
            return super().forward(input)
        # oneDNN is a thousand times slower if the rows of a matrix do not follow each other.
        return cast("_Compute", _Product.apply)(input.contiguous(), self.weight, self.bias)


class _Product(torch.autograd.Function):
    """`states @ weight.T + bias`, and its gradients."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        return _times(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        given, wanted = gradients[0], ctx.needs_input_grad
        rows, read = given.reshape(-1, len(weight)), states.reshape(-1, weight.shape[1])
        return (
            _times(given, weight.t()) if wanted[0] else None,
            _times(rows.t(), read.t()) if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        )


def _times(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = cast("_Compute", torch.ops.mkldnn._linear_pointwise)  # noqa: SLF001 -- no public name
    return product(states, weight, bias, "none", [], "")


def use_onednn(network: nn.Module) -> None:
    """Let oneDNN multiply in a network's large linear layers, where that is faster."""
    if torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512":
        for module in network.modules():
            if type(module) is nn.Linear and module.weight.numel() >= _LARGE:
                module.__class__ = _Linear
