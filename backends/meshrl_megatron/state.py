"""The checkpoint of a model that Megatron-Core trains: its parameters, as parts of Hugging Face's tensors."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshrl_megatron.optimizer import Trained
from meshrl_torch.checkpoint.boxes import Box, Boxes
from meshrl_torch.checkpoint.spread_state import MODEL, SpreadState
from meshrl_torch.ranks.rank_group import RankGroup


class State(SpreadState):
    """A model in training, whose parameters Megatron-Core fuses and splits."""

    def __init__(self, role: str, trained: Trained, ranks: RankGroup, body: str = "model") -> None:
        """`body`: prefix of the decoder's tensors. Other backends write "body" for a critic."""
        super().__init__(role, ranks)
        self._trained, self._body = trained, body

    @property
    def _steps(self) -> int:
        return self._trained.steps

    def _sizes(self) -> Mapping[str, tuple[int, ...]]:
        found = (piece for name in self._trained.names() for piece in self._trained.pieces(name))
        return {self._filed(piece.name): piece.size for piece in found}

    def _held(self, kinds: Sequence[str], *, copied: bool) -> Iterator[Box]:
        for name in self._trained.names():
            kept = {MODEL: self._trained.parameter(name)}
            if len(kinds) > 1:
                kept |= self._trained.moments(name)
            if self._trained.is_writer(name):
                for kind, tensor in kept.items():
                    yield from self._boxes(kind, name, tensor.detach().to("cpu", copy=copied))

    def _begin(self, steps: int) -> None:
        self._trained.begin(steps)

    def _take(self, boxes: Boxes, kinds: Sequence[str]) -> None:
        """Load parameter by parameter, so that only one is held in addition to the model. Padding becomes 0."""
        for name in self._trained.names():
            read = {kind: torch.zeros(self._trained.shape(name)) for kind in kinds}
            boxes.read(box for kind, tensor in read.items() for box in self._boxes(kind, name, tensor))
            for kind, tensor in read.items():
                self._trained.take(name, "parameter" if kind == MODEL else kind, tensor)

    def _boxes(self, kind: str, name: str, tensor: Tensor) -> Iterator[Box]:
        for piece in self._trained.pieces(name):
            yield Box(f"{kind}/{self._filed(piece.name)}", piece.size, piece.offsets, piece.view(tensor))

    def _filed(self, name: str) -> str:
        return f"{self._body}.{name.removeprefix('model.')}" if name.startswith("model.") else name
