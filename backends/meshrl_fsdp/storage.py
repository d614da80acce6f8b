"""Shards in safetensors files: torch.distributed.checkpoint, without its copies of what it writes and reads.

The format is that of torch's `HuggingFaceStorageWriter`: a file for each rank, which says what part of each tensor it
has. Nothing is pickled.
"""

import json
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, cast

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from meshrl.errors import ModelError

_METADATA: Final = {"DCP_VERSION": "1.0", "format": "pt"}
_PARTS: Final = "DCP_SHARDING_INFO"
"""torch's names, which its reader looks for."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Write the tensors, each rank its shards, until they lie on the disk. All ranks of the group do it at once.

    ModelError, on all of them, where one cannot.
    """
    with _told(f"{folder} cannot be written", together=True):
        save(dict(tensors), storage_writer=_Writer(str(folder), save_distributed=True), process_group=group)


class Shards:
    """What the files of a folder have: shards that were written here, or a Hugging Face folder's whole tensors."""

    def __init__(self, folder: Path) -> None:
        """Reads where each part lies. As safetensors, where a file is damaged."""
        self._folder = folder
        self._reader = _Reader(str(folder))
        found = self._reader.read_metadata().state_dict_metadata
        self.tensors: Final = {name: it for name, it in found.items() if isinstance(it, TensorStorageMetadata)}
        """The size of each tensor, and the parts of it that are there."""

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into these tensors, this rank into its shards, whatever the others do. ModelError where it cannot."""
        with _told(f"{self._folder} cannot be read", together=False), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled"
            )  # as is meant: files say all of themselves
            load(dict(tensors), storage_reader=self._reader, no_dist=True)


class _Writer(HuggingFaceStorageWriter):
    """Writes from the tensors' own memory."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        parts: dict[str, dict[str, list[int]]] = {}
        for item in plan.items:
            if item.tensor_data is not None:
                tensors[item.index.fqn] = cast("Tensor", planner.resolve_data(item)).cpu().contiguous()
                parts[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        if tensors:
            file = Path(self.path) / f"shard-{plan.storage_data['shard_index']:05}-model-00001-of-00001.safetensors"
            save_file(tensors, file, metadata={**_METADATA, _PARTS: json.dumps(parts)})
            with file.open("rb") as written:
                os.fsync(written.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, tensors[item.index.fqn].nbytes, None) for item in plan.items])
        return done


class _Opened(Protocol):
    """A safetensors file."""

    def get_tensor(self, name: str) -> Tensor:
        """A tensor of the file, mapped: what is not used of it is not read."""
        ...


class _Reader(HuggingFaceStorageReader):
    """Reads from the page cache into where it belongs, and the files' heads once."""

    _found: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._found is None:
            self._found = super().read_metadata()
        return self._found

    def _process_read_request(self, f: _Opened, req: ReadItem, planner: LoadPlanner) -> None:
        part = f.get_tensor(req.storage_index.fqn)
        for dim, (start, length) in enumerate(zip(req.storage_offsets, req.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        target = planner.resolve_tensor(req).detach()
        target.copy_(part)
        planner.commit_tensor(req, target)


@contextmanager
def _told(what: str, *, together: bool) -> Generator[None]:
    """Say in one line what torch's error has as the tracebacks of all ranks."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        where = f" (on rank {rank})" if together else ""
        raise ModelError(f"{what}: {type(reason).__name__}: {reason}{where}") from error
