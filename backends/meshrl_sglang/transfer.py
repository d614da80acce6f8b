"""Weights into SGLang's schedulers: each reads them from shared memory, through a loader of the format `FORMAT`."""

import json
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from meshrl_inference.naming import Naming
from meshrl_inference.tensors import Places, tensors

FORMAT: Final = "meshrl_sglang.transfer.load"
"""The function that SGLang imports and calls for tensors in this format."""


def told(folder: str, places: Places) -> list[tuple[str, torch.Tensor]]:
    """Return the message for SGLang about a model's weights: the places of all tensors, instead of the tensors."""
    text = json.dumps([folder, places]).encode()
    return [("places", torch.from_numpy(np.frombuffer(text, np.uint8).copy()))]


def load(model: Any, sent: list[tuple[str, torch.Tensor]]) -> None:
    """Load each tensor by its Hugging Face name. They were checked before."""
    ((_, text),) = sent
    folder, places = json.loads(text.cpu().numpy().tobytes())
    model.load_weights(naming(folder).in_files(tensors(places)))


@cache
def naming(folder: str) -> Naming:
    """Return how a policy names the tensors of a folder's model."""
    return Naming(folder)
