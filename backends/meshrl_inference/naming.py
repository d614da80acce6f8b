"""Convert a policy's tensors, which are named as in transformers, to those in files and engines.

They differ for a mixture of experts: a policy has one tensor for all experts of a layer.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from meshrl_torch.wire.fp8 import matrices, refusal

_LAYER: Final = re.compile(r".*?\.\d+\.")


class Naming:
    """The tensors of a folder's model in transformers."""

    def __init__(self, folder: str) -> None:
        with torch.device("meta"):
            self._network: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self.differs: Final = bool(get_model_conversion_mapping(self._network, add_legacy=False))
        """True if files store them differently."""

    def held(self, dtype: str) -> dict[str, tuple[str, list[int]]]:
        """Return dtype and shape of each tensor, by its name in a policy. Tied ones occur once."""
        return {name: (dtype, list(tensor.shape)) for name, tensor in self._tensors()}

    def filed(self) -> dict[str, list[int]]:
        """Return the shape of each tensor in the files of a whole model, by its name there."""
        return {name: list(tensor.shape) for name, tensor in self.in_files(self._tensors())}

    def tied(self) -> dict[str, list[str]]:
        """Return further names of tensors, by the name in a policy."""
        names: dict[int, list[str]] = {}
        for name, tensor in self._network.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        return {first: others for first, *others in names.values() if others}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors without values. Tied ones occur once."""
        seen: set[int] = set()
        for name, tensor in self._network.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    @property
    def matrices(self) -> frozenset[str]:
        """The names of matrices that can be in FP8."""
        return matrices(self._network)

    @property
    def not_for_fp8(self) -> str:
        """Why the model cannot be in FP8. Empty if it can."""
        return refusal(self._network)

    def unit(self, name: str) -> str:
        """Return a label that a policy's tensor shares with those that are converted and loaded together: a layer's."""
        found = _LAYER.match(name)
        return found.group() if found else "" if self.differs else name

    def in_files(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Convert a policy's tensors to those in files. Copies at most the tensors of one layer at a time."""
        if not self.differs:
            yield from tensors
            return
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            layers.setdefault(self.unit(name), {})[name] = tensor
        for layer in layers.values():
            yield from revert_weight_conversion(self._network, layer).items()
