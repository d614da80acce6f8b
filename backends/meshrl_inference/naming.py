"""Tensors as a policy has them, which is as transformers holds them, and as files and engines do.

They differ in a mixture of experts: a policy holds those of all experts of a layer as one.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

_LAYER: Final = re.compile(r".*?\.\d+\.")


class Naming:
    """How transformers holds the model of a folder."""

    def __init__(self, folder: str) -> None:
        with torch.device("meta"):
            self._network: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self.differs: Final = bool(get_model_conversion_mapping(self._network, add_legacy=False))
        """Whether files hold it in another way."""

    def held(self, dtype: str) -> dict[str, tuple[str, list[int]]]:
        """Dtype and shape of each tensor, by the name that it has in a policy; a tied one once."""
        return {name: (dtype, list(tensor.shape)) for name, tensor in self._tensors()}

    def filed(self) -> dict[str, list[int]]:
        """The shape of each tensor that the files of a whole model hold, by its name there."""
        return {name: list(tensor.shape) for name, tensor in self.in_files(self._tensors())}

    def tied(self) -> dict[str, list[str]]:
        """Further names of tensors, by the name that each has in a policy."""
        names: dict[int, list[str]] = {}
        for name, tensor in self._network.state_dict(keep_vars=True).items():
            names.setdefault(id(tensor), []).append(name)
        return {first: others for first, *others in names.values() if others}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Without numbers; a tied one once."""
        seen: set[int] = set()
        for name, tensor in self._network.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def in_files(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """A policy's tensors as files hold them. What is copied for it is the tensors of one layer at a time."""
        if not self.differs:
            yield from tensors
            return
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            found = _LAYER.match(name)
            layers.setdefault(found.group() if found else "", {})[name] = tensor
        for layer in layers.values():
            yield from revert_weight_conversion(self._network, layer).items()
