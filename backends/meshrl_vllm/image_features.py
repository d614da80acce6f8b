"""Images for vLLM as a sampler's processor made them, so that it reads the pixels and tokens that a policy reads."""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.feature_extraction_utils import BatchFeature
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

from meshrl_inference.engine_side.protocol import SeenImage

_KIND: Final = "image"
"""vLLM's name for what is not text."""
_PIXELS: Final = "pixel_values"
_COUNTS: Final = ("num_patches", "image_num_patches")
"""vLLM's names for the number of images that a processor cuts one image into."""


class ImageFeatures:
    """What vLLM reads in place of images."""

    def __init__(self, engine: Any, token: int) -> None:
        """`token`: the one whose embedding is replaced by a feature of an image."""
        self._fields = engine.renderer.get_mm_processor()._get_mm_fields_config  # noqa: SLF001 -- it alone knows them
        self._token = token

    def items(self, images: Mapping[str, SeenImage]) -> Mapping[str, Any]:
        """Return what vLLM takes for each image, by the same names. ValueError if it would take several for one."""
        return {name: self._item(image) for name, image in images.items()}

    def _item(self, image: SeenImage) -> Any:
        tensors = {name: _tensor(each.dtype, each.shape, each.data) for name, each in image.tensors.items()}
        counts = dict.fromkeys(_COUNTS, torch.tensor([len(tensors[_PIXELS])]))
        made = BatchFeature({**tensors, **counts, "image_token_id": torch.tensor(self._token)})
        (item,) = MultiModalKwargsItems.from_hf_inputs(made, self._fields(made, {}))[_KIND]
        return item

    def prompt(
        self, tokens: NDArray[np.int32], salt: str, images: Sequence[SeenImage], items: Sequence[Any]
    ) -> Mapping[str, Any]:
        """Return a prompt whose images stand in these tokens already."""
        places, ranges = np.flatnonzero(tokens == self._token), list[PlaceholderRange]()
        for image in images:
            own, places = places[: image.tokens], places[image.tokens :]
            first, length = int(own[0]), int(own[-1] - own[0] + 1)
            among = torch.from_numpy(tokens[first : first + length] == self._token)
            ranges.append(PlaceholderRange(first, length, None if bool(among.all()) else among))
        hashes = {_KIND: [image.fingerprint for image in images]}
        given: Mapping[str, Any] = mm_input(
            tokens.tolist(), MultiModalKwargsItems({_KIND: list(items)}), hashes, {_KIND: ranges}, cache_salt=salt
        )
        return given


def _tensor(dtype: str, shape: Sequence[int], data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(list(shape))
