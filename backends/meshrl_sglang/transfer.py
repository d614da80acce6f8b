"""Weights into SGLang's schedulers: each reads them by itself, through a loader of the format `FORMAT`.

They are in shared memory, or the policy's ranks broadcast them.
"""

import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from meshrl_inference.assembly import read
from meshrl_inference.engine import Outcome
from meshrl_inference.naming import Naming
from meshrl_inference.tensors import Places, tensors
from meshrl_torch.wire.manifest import Offer

FORMAT: Final = "meshrl_sglang.transfer.load"
"""The function that SGLang imports and calls for tensors in this format."""
_ROWS: Final = 2
"""Rows of each tensor that are kept to be compared."""


class Sent(msgspec.Struct, frozen=True):
    """The message for the schedulers, in place of tensors."""

    model: str
    """The model's folder."""
    places: Places
    """Files in shared memory, with the name, dtype, shape and offset in bytes of each tensor."""
    offer: Offer | None
    """The offer of the policy's ranks, if each scheduler reads their broadcast."""
    together: int
    """Number of processes that read the broadcast at once."""
    answers: str
    """A folder, for a file of each scheduler that says how it has read a broadcast."""
    keeps: bool
    """True to write the first rows of tensors of a broadcast there too."""

    def encode(self) -> list[tuple[str, torch.Tensor]]:
        """Return it as SGLang takes it."""
        text = msgspec.json.encode(self)
        return [("sent", torch.from_numpy(np.frombuffer(text, np.uint8).copy()))]

    @property
    def firsts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The first rows of all tensors, or more, after a load."""
        if self.offer is None:
            yield from tensors(self.places)
        else:
            yield from load_file(next(Path(self.answers).glob("*.safetensors"))).items()

    @property
    def outcomes(self) -> list[Outcome]:
        """How each scheduler has read the broadcast, after the load."""
        files = Path(self.answers).glob("*.json")
        return [msgspec.json.decode(file.read_bytes(), type=Outcome) for file in files]


def load(model: Any, sent: list[tuple[str, torch.Tensor]]) -> None:
    """Load each tensor by its Hugging Face name. Those in shared memory were checked before."""
    ((_, text),) = sent
    told = msgspec.json.decode(text.cpu().numpy().tobytes(), type=Sent)
    if told.offer is None:
        model.load_weights(naming(told.model).in_files(tensors(told.places)))
        return
    kept: dict[str, torch.Tensor] = {}

    def load_whole(whole: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = list(whole)
        if told.keeps:
            kept.update((name, tensor[:_ROWS].to("cpu", copy=True)) for name, tensor in pairs)
        model.load_weights(pairs)

    device = next(model.parameters()).device
    outcome = read(told.offer, told.together, naming(told.model), device, lambda: None, load_whole)
    answer = Path(told.answers, f"{os.getpid()}.json")
    if told.keeps:
        save_file(kept, answer.with_suffix(".safetensors"))
    answer.write_bytes(msgspec.json.encode(outcome))


@cache
def naming(folder: str) -> Naming:
    """Return how a policy names the tensors of a folder's model."""
    return Naming(folder)
