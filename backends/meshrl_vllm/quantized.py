"""Matrices in FP8 for vLLM: its configuration for them, and tensors in the form that it then loads.

The form is that of the library compressed-tensors, whose kernels vLLM has for CPUs and GPUs.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final

from torch import Tensor
from torch.nn import Module

from meshrl_hf.fp8 import quantized
from meshrl_hf.offer import SCALE
from meshrl_inference.naming import Naming

_NUMBERS: Final = {"num_bits": 8, "type": "float", "symmetric": True}
CONFIG: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
        }
    },
}
"""The value of `quantization_config` in a model's config.json: a scale for each row of a matrix, and for each token."""


def in_fp8(tensors: Iterable[tuple[str, Tensor]], matrices: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, with the named matrices in FP8 and their scales after them. Those that are in FP8 stay as is."""
    for name, tensor in tensors:
        if name in matrices and tensor.dtype.itemsize > 1:
            numbers, scales = quantized(tensor)
            yield name, numbers
            yield name + SCALE, scales
        else:
            yield name, tensor


def check_model(naming: Naming) -> None:
    """Raise ValueError for a mixture of experts, whose matrices are no linear layers."""
    if naming.differs:
        raise ValueError("a mixture of experts cannot be in FP8: remove sampler.vllm.quantization")


def names_of_scales(model: Module) -> Collection[str]:
    """Return the names of the scales of a vLLM model's matrices, before they are loaded. Its caches have others."""
    return [name for name, _ in model.named_parameters() if name.endswith(f".weight{SCALE}")]


def check_scales(scales: Collection[str], loaded: Collection[str]) -> None:
    """Raise ValueError if some matrices of a vLLM model have got no scales. `loaded`: the names of what was loaded."""
    if missing := sorted(set(scales) - set(loaded)):
        raise ValueError(
            f"{len(missing)} of {len(scales)} matrices are not linear layers in transformers, or have other names "
            f"there ({', '.join(missing[:3])}): they cannot be in FP8. Remove sampler.vllm.quantization"
        )
