"""Weights into SGLang's schedulers: each reads them by itself, through a loader of the format `FORMAT`.

They are in shared memory, or the policy's ranks broadcast them. `read_back` is a second proof that they are in use.
"""

# SGLang may be in another environment than this one.
# pyright: reportMissingImports=false

import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from meshrl_inference.engine_side.loading import Naming, read_broadcast, shared_tensors
from meshrl_inference.engine_side.protocol import Outcome, SharedBucket
from meshrl_torch.wire.manifest import Manifest

FORMAT: Final = "meshrl_sglang.transfer.load"
"""The function that SGLang imports and calls for tensors in this format."""
_ROWS: Final = 2
"""Rows of each tensor that `read_back` compares."""


class WeightsMessage(msgspec.Struct, frozen=True):
    """The message for the schedulers, in place of tensors."""

    model: str
    """The model's folder."""
    buckets: list[SharedBucket]
    """Of weights in shared memory."""
    manifest: Manifest | None
    """Of the policy's ranks, if each scheduler reads their broadcast."""
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
        if self.manifest is None:
            yield from shared_tensors(self.buckets)
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
    order = msgspec.json.decode(text.cpu().numpy().tobytes(), type=WeightsMessage)
    if order.manifest is None:
        model.load_weights(naming(order.model).in_files(shared_tensors(order.buckets)))
        return
    kept: dict[str, torch.Tensor] = {}

    def load_whole(whole: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = list(whole)
        if order.keeps:
            kept.update((name, tensor[:_ROWS].to("cpu", copy=True)) for name, tensor in pairs)
        model.load_weights(pairs)

    device = next(model.parameters()).device
    outcome = read_broadcast(order.manifest, order.together, naming(order.model), device, lambda: None, load_whole)
    answer = Path(order.answers, f"{os.getpid()}.json")
    if order.keeps:
        save_file(kept, answer.with_suffix(".safetensors"))
    answer.write_bytes(msgspec.json.encode(outcome))


async def read_back(manager: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Read back the first rows of each tensor. RuntimeError if they differ from those sent, or are missing."""
    from sglang.srt.managers.io_struct import GetWeightsByNameReqInput  # noqa: PLC0415 -- in an environment that is set

    for name, tensor in tensors:
        rows = await manager.get_weights_by_name(GetWeightsByNameReqInput(name=name, truncate_size=_ROWS))
        if rows is None:
            raise RuntimeError(f"SGLang cannot tell `{name}` of this model: remove sampler.sglang.verify_weights")
        if not torch.equal(torch.tensor(rows), tensor[:_ROWS].float()):
            raise RuntimeError(f"SGLang has another `{name}` than was sent, and its completions cannot be trusted")


@cache
def naming(folder: str) -> Naming:
    """Return how a policy names the tensors of a folder's model."""
    return Naming(folder)
