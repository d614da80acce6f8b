"""What a checkpoint keeps of a model that is spread over ranks: each rank writes its shards, as safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

import msgspec
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from meshrl.errors import ModelError
from meshrl_fsdp.optimizer import ShardedOptimizer
from meshrl_fsdp.world import World

_NUMBERS: Final = "state.json"
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_REMEDY: Final = "go on with the configuration that the checkpoint was written with, or start a run of another name"


class _Numbers(msgspec.Struct, frozen=True):
    role: str
    steps: int


class ShardedState:
    """A model in training. What `write` writes, `read` puts back, to the bit, also on another number of ranks.

    torch.distributed.checkpoint writes and reads safetensors: nothing is pickled.
    """

    def __init__(
        self, role: str, world: World, parameters: Mapping[str, nn.Parameter], optimizer: ShardedOptimizer
    ) -> None:
        """`parameters`: what the optimizer steps over, in its order, by name."""
        self._role, self._world, self._optimizer = role, world, optimizer
        self._parameters = {name: cast("DTensor", parameter) for name, parameter in parameters.items()}

    def write(self, folder: str) -> None:
        """Write a file for each rank, and one of numbers. All ranks call it at the same time."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        moments = _MOMENTS if self._optimizer.steps else ()
        writer = HuggingFaceStorageWriter(folder, save_distributed=True)
        save(dict(self._tensors(moments)), storage_writer=writer)
        numbers = msgspec.json.encode(_Numbers(self._role, self._optimizer.steps))
        self._world.first(lambda: _write(Path(folder, _NUMBERS), numbers))

    def read(self, folder: str) -> None:
        """Take what `write` wrote; ModelError, and nothing taken, where it is of another role or model."""
        numbers = self._world.agree(lambda: self._checked(Path(folder)))[0]
        self._optimizer.begin(numbers.steps)
        tensors = self._tensors(_MOMENTS if numbers.steps else ())
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(folder))

    def _tensors(self, moments: tuple[str, ...]) -> dict[str, Tensor]:
        """The parameters and what AdamW keeps of them, sharded alike. Writing into them changes both."""
        tensors: dict[str, Tensor] = {f"model/{name}": each.detach() for name, each in self._parameters.items()}
        for moment in moments:
            kept = self._optimizer.moments(moment)
            for (name, parameter), shard in zip(self._parameters.items(), kept, strict=True):
                tensors[f"{moment}/{name}"] = DTensor.from_local(
                    shard,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        return tensors

    def _checked(self, path: Path) -> _Numbers:
        try:
            numbers = msgspec.json.decode((path / _NUMBERS).read_bytes(), type=_Numbers)
            found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        except (OSError, msgspec.DecodeError, ValueError, KeyError) as error:
            raise ModelError(
                f"{path} cannot be read as the state of a {self._role}: {type(error).__name__}: {error}. Remove the "
                "checkpoint that it belongs to, to go on from the one before"
            ) from error
        if numbers.role != self._role:
            raise ModelError(f"{path} is the state of a {numbers.role}, not of a {self._role}; {_REMEDY}")
        there = {name: list(it.size) for name, it in found.items() if isinstance(it, TensorStorageMetadata)}
        kinds = ("model", *(_MOMENTS if numbers.steps else ()))
        here = {f"{kind}/{name}": list(each.shape) for kind in kinds for name, each in self._parameters.items()}
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise ModelError(
                    f"{path} is the state of another {self._role}: `{name.partition('/')[2]}` is "
                    f"{there.get(name, 'missing')} there and {here.get(name, 'missing')} here; {_REMEDY}"
                )
        return numbers


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
