"""Check the weights that arrived in the engine's process."""

import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from meshrl_inference.mapped import mapped
from meshrl_inference.messages import Load, Part

_threads: Final = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "meshrl-fingerprint")
"""One thread does not use the memory's whole bandwidth."""

Known = Mapping[str, tuple[str, list[int]]]
"""Dtype and shape of each tensor of the model, by its Hugging Face name."""


def wrong(load: Load, known: Known) -> str | None:
    """Return why these are not the model's weights as they were sent, or None."""
    there = load.forms
    for name in sorted(known.keys() | there.keys()):
        if there.get(name) != known.get(name):
            return (
                f"`{name}` is {_told(there.get(name))} there and {_told(known.get(name))} in the model. Give the "
                "policy and the sampler the same `model` and `dtype`"
            )
    damaged = [name for bucket in load.buckets for name in _damaged(bucket.path, bucket.parts)]
    if damaged:
        return f"{len(damaged)} tensors did not arrive as they were sent: {', '.join(damaged[:3])}. Publish them again"
    return None


def _damaged(path: str, parts: Sequence[Part]) -> list[str]:
    memory = mapped(path)
    made = _threads.map(lambda part: _fingerprint(memory, part), parts)
    return [part.name for part, each in zip(parts, made, strict=True) if each != part.fingerprint]


def _fingerprint(memory: mmap.mmap, part: Part) -> int:
    size = np.dtype({"bfloat16": "int16"}.get(part.dtype, part.dtype)).itemsize
    with memoryview(memory) as view, view[part.start : part.start + prod(part.shape) * size] as piece:
        return xxh3_64_intdigest(piece)


def _told(tensor: tuple[str, list[int]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]}{tensor[1]}"
