"""The checkpoint of a sharded model: each rank writes its shards, as safetensors."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from meshrl_torch.checkpoint.boxes import Box, Boxes
from meshrl_torch.checkpoint.spread_state import MODEL, SpreadState
from meshrl_torch.train.fsdp.optimizer import ShardedOptimizer
from meshrl_torch.train.fsdp.parts import is_split, local, rectangle
from meshrl_torch.train.fsdp.sharded import Sharded
from meshrl_torch.train.fsdp.world import REPLICATE, TP


class ShardedState(SpreadState):
    """A model in training, whose parameters are DTensors."""

    def __init__(
        self, role: str, sharded: Sharded, parameters: Mapping[str, nn.Parameter], optimizer: ShardedOptimizer
    ) -> None:
        """`parameters`: those that the optimizer steps over, in its order, by name."""
        super().__init__(role, sharded.world)
        self._sharded, self._optimizer = sharded, optimizer
        self._parameters = parameters

    @property
    def _steps(self) -> int:
        return self._optimizer.steps

    def _sizes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def _held(self, kinds: Sequence[str], *, copied: bool) -> Iterator[Box]:
        for box in self._boxes(kinds, self._written_here()):
            yield replace(box, tensor=box.tensor.to("cpu", copy=copied))

    def _begin(self, steps: int) -> None:
        self._optimizer.begin(steps)

    def _take(self, boxes: Boxes, kinds: Sequence[str]) -> None:
        boxes.read(self._boxes(kinds, self._parameters))

    def _boxes(self, kinds: Sequence[str], names: Collection[str]) -> Iterator[Box]:
        """Yield this rank's shards, as views of the model and its moments."""
        self._sharded.reshard()
        for kind in kinds:
            own = map(local, self._parameters.values()) if kind == MODEL else self._optimizer.moments(kind)
            for (name, parameter), part in zip(self._parameters.items(), own, strict=True):
                if name in names:
                    yield from rectangle(f"{kind}/{name}", parameter, part)

    def _written_here(self) -> Collection[str]:
        """Names that this rank writes. Of ranks with the same part one writes it, and replicas share the work."""
        mesh = self._sharded.world.mesh
        loads = [0] * mesh[REPLICATE].size()
        names: set[str] = set()
        for name, parameter in self._parameters.items():
            lightest = loads.index(min(loads))
            loads[lightest] += parameter.numel()
            alone = is_split(parameter) or mesh.get_local_rank(TP) == 0
            if alone and lightest == mesh.get_local_rank(REPLICATE):
                names.add(name)
        return names
