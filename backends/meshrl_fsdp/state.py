"""What a checkpoint keeps of a model that is spread over ranks: each rank writes its shards, as safetensors."""

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Final, cast

import msgspec
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshrl.errors import ModelError
from meshrl_fsdp.optimizer import MOMENTS, ShardedOptimizer
from meshrl_fsdp.sharded import Sharded
from meshrl_fsdp.storage import Shards, write_shards
from meshrl_hf.writing import Writing

_NUMBERS: Final = "state.json"
_REMEDY: Final = "go on with the configuration that the checkpoint was written with, or start a run of another name"


class _Numbers(msgspec.Struct, frozen=True):
    role: str
    steps: int


class ShardedState:
    """A model in training. What `write` keeps, `read` puts back, to the bit, also on another number of ranks."""

    def __init__(
        self, role: str, sharded: Sharded, parameters: Mapping[str, nn.Parameter], optimizer: ShardedOptimizer
    ) -> None:
        """`parameters`: what the optimizer steps over, in its order, by name."""
        self._role, self._world, self._optimizer = role, sharded.world, optimizer
        self._reshard = sharded.reshard
        self._parameters = {name: cast("DTensor", parameter) for name, parameter in parameters.items()}
        self._writers = cast(
            "dist.ProcessGroup", dist.new_group(backend="gloo")
        )  # of its own: the thread's messages and training's never meet
        self._writing = Writing()

    def write(self, folder: str, wait: bool) -> None:
        """Write a file for each rank, and one of numbers. All ranks do it at once.

        With `wait = False` it returns when the state is copied, and a thread writes the copy: `written` tells the end.
        """
        self._world.agree(lambda: Path(folder).mkdir(parents=True, exist_ok=True))
        self._writing.settle()
        self._reshard()
        tensors, numbers = self._tensors(self._moments), _Numbers(self._role, self._optimizer.steps)
        if wait:
            self._write(Path(folder), tensors, numbers)
        else:
            copies = {name: self._copied(tensor) for name, tensor in tensors.items()}
            self._writing.begin(partial(self._write, Path(folder), copies, numbers))

    async def written(self) -> None:
        """Wait until the last copy is written. Raises what went wrong."""
        await self._writing.written()

    def _write(self, folder: Path, tensors: Mapping[str, DTensor], numbers: _Numbers) -> None:
        write_shards(folder, tensors, self._writers)
        if dist.get_rank() == 0:
            (folder / _NUMBERS).write_bytes(msgspec.json.encode(numbers))

    def _copied(self, tensor: DTensor) -> DTensor:
        """The same shard, in the host's memory."""
        mesh = self._world.host[cast("tuple[str, ...]", tensor.device_mesh.mesh_dim_names)]
        return _placed(tensor.to_local().to("cpu", copy=True), tensor, mesh)

    @property
    def _moments(self) -> tuple[str, ...]:
        return MOMENTS if self._optimizer.steps else ()

    def read(self, folder: str) -> None:
        """Take what `write` wrote; ModelError, and nothing taken, where it is of another role or model.

        ModelError too where a file cannot be read to its end: then part of it is taken.
        """
        opened: list[tuple[_Numbers, Shards]] = []
        self._world.agree(lambda: opened.append(self._open(Path(folder))))
        numbers, shards = opened[0]
        self._reshard()
        self._optimizer.begin(numbers.steps)
        tensors = self._tensors(MOMENTS if numbers.steps else ())
        try:
            self._world.agree(lambda: shards.read(tensors))
        except ModelError as error:
            raise ModelError(
                f"{error}. The {self._role} has taken a part of it, and is of no use now: restore it again, or spawn "
                "it anew"
            ) from error

    def _tensors(self, moments: tuple[str, ...]) -> dict[str, DTensor]:
        """The parameters and what AdamW keeps of them, sharded alike. Writing into them changes both."""
        tensors = {f"model/{name}": cast("DTensor", each.detach()) for name, each in self._parameters.items()}
        for moment in moments:
            kept = self._optimizer.moments(moment)
            for (name, parameter), shard in zip(self._parameters.items(), kept, strict=True):
                tensors[f"{moment}/{name}"] = _placed(shard, parameter, parameter.device_mesh)
        return tensors

    def _open(self, path: Path) -> tuple[_Numbers, Shards]:
        try:
            numbers = msgspec.json.decode((path / _NUMBERS).read_bytes(), type=_Numbers)
            shards = Shards(path)
        except (OSError, msgspec.DecodeError, SafetensorError, ValueError, KeyError) as error:
            raise ModelError(
                f"{path} cannot be read as the state of a {self._role}: {type(error).__name__}: {error}. Remove the "
                "checkpoint that it belongs to, to go on from the one before"
            ) from error
        if numbers.role != self._role:
            raise ModelError(f"{path} is the state of a {numbers.role}, not of a {self._role}; {_REMEDY}")
        for name, it in shards.tensors.items():
            if sum(prod(chunk.sizes) for chunk in it.chunks) != prod(it.size):
                raise ModelError(
                    f"{path} lacks a part of `{name.partition('/')[2]}`: a rank's file is missing. Remove the "
                    "checkpoint that it belongs to, to go on from the one before"
                )
        there = {name: list(it.size) for name, it in shards.tensors.items()}
        kinds = ("model", *(MOMENTS if numbers.steps else ()))
        here = {f"{kind}/{name}": list(each.shape) for kind in kinds for name, each in self._parameters.items()}
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise ModelError(
                    f"{path} is the state of another {self._role}: `{name.partition('/')[2]}` is "
                    f"{there.get(name, 'missing')} there and {here.get(name, 'missing')} here; {_REMEDY}"
                )
        return numbers, shards


def _placed(shard: Tensor, like: DTensor, mesh: DeviceMesh) -> DTensor:
    """This rank's shard of a tensor that is spread as another is."""
    return DTensor.from_local(shard, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
