"""A rank's own part of a tensor that is spread over ranks."""

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from meshrl_fsdp.world import TP
from meshrl_hf.boxes import Box


class _Chunked(Protocol):
    """What torch.distributed.checkpoint asks of a tensor that is spread over ranks."""

    def __create_chunk_list__(self) -> Sequence[ChunkStorageMetadata]:
        """Where this rank's part lies in the whole."""
        ...


def local(tensor: Tensor) -> Tensor:
    """This rank's part, or all of a tensor that is not spread. Writing into it changes the tensor."""
    return cast("DTensor", tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def rectangle(name: str, tensor: Tensor, part: Tensor) -> Iterator[Box]:
    """This rank's part of a DTensor, or another of the part's shape, with where it lies; nothing where it is empty."""
    if part.numel():
        (chunk,) = cast("_Chunked", tensor).__create_chunk_list__()
        yield Box(name, tuple(tensor.shape), tuple(chunk.offsets), part)


def is_split(tensor: Tensor) -> bool:
    """Whether each rank along `tp` has another part of a DTensor; a bias may be whole on all."""
    spread = cast("DTensor", tensor)
    names = spread.device_mesh.mesh_dim_names or ()
    return any(name == TP and kind.is_shard() for name, kind in zip(names, spread.placements, strict=True))
