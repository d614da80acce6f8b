"""The memory that a model needs to look at images: its own code runs, with weights that take no memory."""

from io import BytesIO
from math import isqrt
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from meshrl.data import Images, name_of
from meshrl.roles import MemoryTerm, ModelConfig, PolicyConfig, Workload
from meshrl_torch.estimate.rehearsal import LiveBytes
from meshrl_torch.model.chat import words_of
from meshrl_torch.model.loading import config_of, quiet, vision_of, without_values
from meshrl_torch.model.network import body_of
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.model.vision import ImageInputs, Vision

_A_TOKEN: Final = 32
"""Pixels of the side of the part of an image that becomes a token, in the models that take images of any size."""
_SMALL: Final = 64
"""Tokens of an image that is looked at with values."""


def image_memory(config: ModelConfig, work: Workload, budget: int, during: str, *, host: bool) -> list[MemoryTerm]:
    """Return the memory that a micro-batch of `budget` tokens needs for its images. It looks at each once.

    Each prompt has one, as large as the prompt and the processor allow. Rows are sorted by length, so those of a
    micro-batch may all be of different prompts. Empty if the model sees none.
    """
    shape = config_of(config)
    if vision_of(config, shape, character_tokenizer("a", 8)) is None:
        return []
    vision = words_of(config).vision
    if vision is None or (seen := _largest(vision, work.prompt)) is None:
        return []
    with quiet():
        network = without_values(shape, dtype=getattr(torch, config.dtype))
    rows = max(1, min(work.own_rows, budget // work.tokens))
    images, trains = min(rows, -(-work.rows // work.n)), isinstance(config, PolicyConfig) and config.train_vision
    try:
        size = _peak(network, seen, "meta", trains=trains)
    except Exception:  # noqa: BLE001 -- a model's own code, which may read values: then of a small image
        small = _largest(vision, min(work.prompt, _SMALL)) or seen
        size = _peak(network, small, "cpu", trains=trains) * seen.tokens // small.tokens
    text = f"what sees, for {images} images of {seen.tokens} tokens{', kept until their gradients' if trains else ''}"
    return [MemoryTerm("images", images * size, during, text, host)]


def _peak(network: PreTrainedModel, seen: ImageInputs, device: str, *, trains: bool) -> int:
    """Return the most bytes that are alive while a network without values looks at an image, with its pixels."""
    if device != "meta":  # all values of a tensor are in one place
        for module in network.modules():
            for name, each in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                value = torch.zeros((), dtype=each.dtype).expand(each.shape)
                own = nn.Parameter(value) if isinstance(each, nn.Parameter) else value
                setattr(module, name, own)
    look: Any = body_of(network).get_image_features
    with LiveBytes() as live, torch.set_grad_enabled(trains):
        pixels = {name: each.to(device, copy=True) for name, each in seen.inputs.items() if each.is_floating_point()}
        look(**{**seen.inputs, **pixels})
    return live.peak()


def _largest(vision: Vision, tokens: int) -> ImageInputs | None:
    """Return a square image of at most this many tokens. None if the processor makes none so small."""
    from PIL import Image  # noqa: PLC0415 -- an extra

    side = _A_TOKEN * (1 + isqrt(tokens))
    while side >= _A_TOKEN // 2:
        file = BytesIO()
        Image.new("RGB", (side, side), "white").save(file, "PNG")
        data = file.getvalue()
        seen = vision.seen(Images([[name_of(data)]], {name_of(data): data}), name_of(data), "an image")
        if seen.tokens <= tokens:
            return seen
        side = side * 3 // 4
    return None
