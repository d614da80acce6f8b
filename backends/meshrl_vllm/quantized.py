"""Matrices in FP8 for vLLM: its configuration for them, and a loader that converts a model's files.

The form is that of the library compressed-tensors, for which vLLM has kernels for CPUs and GPUs.
"""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from meshrl_inference.engine_side.loading import Naming
from meshrl_torch.wire.fp8 import quantized
from meshrl_torch.wire.manifest import SCALE

NAME: Final = "meshrl-fp8"
"""vLLM's name of the loader."""
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


class Loader(DefaultModelLoader):
    """Loads a model's files with their matrices in FP8."""

    def __init__(self, load_config: Any) -> None:
        # Tracked: a tensor that no file has is an error.
        extra = {"enable_weights_track": True}
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config=extra))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that vLLM loads. ValueError, before the first, if the model cannot be in FP8."""
        naming = Naming(model_config.model)
        if refusal := naming.fp8_refusal:
            raise ValueError(f"{refusal}. Remove sampler.vllm.quantization")
        device = next(model.parameters()).device
        yield from in_fp8(super().get_all_weights(model_config, model), naming.matrices, device)


def in_fp8(
    tensors: Iterable[tuple[str, Tensor]], matrices: Collection[str], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, with the named matrices in FP8 and their scales after them. Those that are in FP8 stay as is.

    `device`: where they are rounded.
    """
    for name, tensor in tensors:
        if name in matrices and tensor.dtype.itemsize > 1:
            numbers, scales = quantized(tensor.to(device))
            yield name, numbers
            yield name + SCALE, scales
        else:
            yield name, tensor


register_model_loader(NAME)(Loader)
