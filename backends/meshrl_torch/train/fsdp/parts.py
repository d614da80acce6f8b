"""A rank's part of a tensor that is spread over ranks."""

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.train.fsdp.world import TP


class _Chunked(Protocol):
    """The interface of spread tensors for torch.distributed.checkpoint."""

    def __create_chunk_list__(self) -> Sequence[ChunkStorageMetadata]:
        """Return the place of this rank's part in the whole."""
        ...


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, as a view, or a whole tensor as it is."""
    return cast("DTensor", tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def rectangle(name: str, tensor: Tensor, part: Tensor) -> Iterator[Box]:
    """Yield this rank's part of a tensor, or another of its shape, with its place. Nothing if it is empty."""
    if not part.numel():
        return
    if not isinstance(tensor, DTensor):
        yield Box(name, tuple(tensor.shape), (0,) * tensor.dim(), part)
    else:
        (chunk,) = cast("_Chunked", tensor).__create_chunk_list__()
        yield Box(name, tuple(tensor.shape), tuple(chunk.offsets), part)


def is_split(tensor: Tensor) -> bool:
    """True if each rank along `tp` has another part of a DTensor. A bias may be whole on all."""
    spread = cast("DTensor", tensor)
    names = spread.device_mesh.mesh_dim_names or ()
    return any(name == TP and kind.is_shard() for name, kind in zip(names, spread.placements, strict=True))


def is_first(tensor: Tensor) -> bool:
    """True if no rank before this one has the same part."""
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == 0
    mesh, kinds = tensor.device_mesh, tensor.placements
    return all(kind.is_shard() or mesh.get_local_rank(dim) == 0 for dim, kind in enumerate(kinds))
