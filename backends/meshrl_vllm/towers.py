"""The names of what sees: transformers writes those of towers of CLIP and SigLIP without a part that vLLM has."""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

NAME: Final = "meshrl-images"
"""vLLM's name of the loader."""
_TOWER: Final = "vision_tower."
_INNER: Final = _TOWER + "vision_model."
"""How names of a tower's tensors begin in files of the hub, and in vLLM."""


class Loader(DefaultModelLoader):
    """Loads a model's files, whichever names their tower has."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that vLLM loads."""
        yield from in_tower(super().get_all_weights(model_config, model), model)


def in_tower(tensors: Iterable[tuple[str, Tensor]], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, those of a tower by the names that vLLM knows."""
    is_inner = any(f"{name}." == _INNER for name, _ in model.named_modules())
    for name, tensor in tensors:
        is_short = is_inner and name.startswith(_TOWER) and not name.startswith(_INNER)
        yield name.replace(_TOWER, _INNER, 1) if is_short else name, tensor


register_model_loader(NAME)(Loader)
