"""Whole weights into a model that is spread over the ranks."""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from meshrl.sharding import Array
from meshrl.weights import Weights
from meshrl_fsdp.sharded import Sharded
from meshrl_hf.transfer import Form, check_weights, copy_into


class _Chunked(Protocol):
    """What torch.distributed.checkpoint asks of a tensor that is spread over ranks."""

    def __create_chunk_list__(self) -> Sequence[ChunkStorageMetadata]:
        """Where this rank's part lies in the whole."""
        ...


def take(sharded: Sharded, weights: Weights, dtype: str) -> None:
    """Copy weights, whole tensors of `dtype`, into a model's shards: each rank its own, all at the same time.

    ModelError, on all ranks and nothing copied, if they are of another model or have not the bytes that were sent.
    """
    sharded.reshard()
    own = sharded.saved
    forms = {name: Form(dtype, tuple(tensor.shape)) for name, tensor in own.items()}
    sharded.world.agree(lambda: check_weights(forms, weights))
    with torch.no_grad():
        for name, tensor in own.items():
            _copy(tensor.detach(), weights.tensors[name])


def _copy(tensor: Tensor, whole: Array) -> None:
    if not isinstance(tensor, DTensor):
        copy_into(tensor, whole)
        return
    local = tensor.to_local()
    if local.numel():
        (chunk,) = cast("_Chunked", tensor).__create_chunk_list__()
        spans = zip(chunk.offsets, chunk.sizes, strict=True)
        copy_into(local, whole[tuple(slice(start, start + size) for start, size in spans)])
