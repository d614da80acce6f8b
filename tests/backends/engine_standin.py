"""Stands for Transformer Engine 2.11.0 on a CPU: its parameters and attributes, without its kernels.

`tests/contracts` compares the signatures of `Linear` and `RMSNorm` with the release's own. Other classes are only
there because Megatron-Core derives from them. Submodules are missing, so that Megatron-Core takes what it has itself.
"""

import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

used: list[str] = []
"""The class of each module of the stand-in that has computed something, once for each call."""


class Linear(nn.Module):
    def __init__(  # noqa: PLR0913, PLR0917 -- as many as the real one takes
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: dist.ProcessGroup | None = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], object] | None = None, rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], object] | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        parameters_split: dict[str, int] | None = None, device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, ub_name: str | None = None,
        delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None, save_original_input: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert tp_size == 1
        assert not any((fuse_wgrad_accumulation, return_bias, delay_wgrad_compute, ub_name))
        self.parallel_mode = parallel_mode
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        divided = {"tensor_model_parallel": True, "partition_dim": int(parallel_mode == "row"), "partition_stride": 1}
        # Without one it is an empty tensor, and not None.
        self.bias: Tensor = torch.empty(0, dtype=params_dtype, device=device)
        if bias:
            del self.bias
            self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device))
        for parameter in self.parameters():
            vars(parameter).update(divided)

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor:  # fmt: skip
        used.append(f"{type(self).__name__}")
        return functional.linear(inp, self.weight, self.bias if len(self.bias) else None)


class RMSNorm(nn.Module):
    def __init__(
        self, normalized_shape: int | None = None, eps: float = 1e-5, sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None, zero_centered_gamma: bool = False, hidden_size: int | None = None,
        **kwargs: torch.device | str,
    ) -> None:  # fmt: skip
        super().__init__()
        assert not zero_centered_gamma
        if hidden_size is not None:  # as Megatron-Core calls it up to 0.16
            told = (
                "`hidden_size` arg has been renamed to `normalized_shape` for compatibility with `torch.nn.LayerNorm`."
            )
            warnings.warn(told, DeprecationWarning, stacklevel=2)
        size = cast("int", normalized_shape or hidden_size)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype, device=kwargs["device"]))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> Tensor:
        used.append("RMSNorm")
        return functional.rms_norm(states, states.shape[-1:], self.weight, self.eps)


_PARTS = ("distributed", "fp8", "ops", "router", "tensor")
_NAMES = ("", ".common", ".common.recipe", ".pytorch", *(f".pytorch.{part}" for part in _PARTS))
"""The modules that Megatron-Core cannot do without, as it believes that it has found Transformer Engine."""


class _Absent(ModuleType):
    def __getattr__(self, name: str) -> type[nn.Module]:
        if name.startswith("_"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


def install() -> None:
    """Make it importable as `transformer_engine`, before Megatron-Core is imported."""
    made = {name: _Absent(f"transformer_engine{name}") for name in _NAMES}
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if last:
            made[parent].__dict__[last] = module
        sys.modules[module.__name__] = module
    made[""].__dict__["__version__"] = "2.11.0"
    made[".pytorch"].__dict__.update(Linear=Linear, RMSNorm=RMSNorm)
