"""What a checkpoint keeps of a model that Megatron-Core trains: parameters as the parts of Hugging Face's tensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshrl_hf.boxes import Box, Boxes
from meshrl_hf.ranks import RankGroup
from meshrl_hf.spread_state import MODEL, SpreadState
from meshrl_megatron.naming import Piece


class Tensors(Protocol):
    """A rank's part of a model in training: parameters by their local names, and what AdamW keeps of them."""

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        ...

    def names(self) -> Sequence[str]:
        """This rank's parameters, in an order that all ranks of its stage share."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's on this rank."""
        ...

    def pieces(self, name: str) -> list[Piece]:
        """Where it lies in Hugging Face tensors."""
        ...

    def is_writer(self, name: str) -> bool:
        """Whether this rank writes it: exactly one of those that hold the same."""
        ...

    def parameter(self, name: str) -> Tensor:
        """What is trained, float32. The ranks that share it call at the same time."""
        ...

    def moments(self, name: str) -> Mapping[str, Tensor]:
        """MOMENTS, each of the parameter's shape. The ranks that share them call at the same time."""
        ...

    def begin(self, steps: int) -> None:
        """Go on after this many steps, with moments that are taken next; after 0 there are none."""
        ...

    def take(self, name: str, kind: str, tensor: Tensor) -> None:
        """Set what is trained ("parameter") or one of MOMENTS from a tensor of the parameter's shape, by itself."""
        ...


class State(SpreadState):
    """A model in training, whose parameters Megatron-Core fuses and splits."""

    def __init__(self, role: str, tensors: Tensors, ranks: RankGroup, body: str = "model") -> None:
        """`body`: what stands before the names of the decoder's tensors. Other backends write "body" for a critic."""
        super().__init__(role, ranks)
        self._tensors, self._body = tensors, body

    @property
    def _steps(self) -> int:
        return self._tensors.steps

    def _sizes(self) -> Mapping[str, tuple[int, ...]]:
        found = (piece for name in self._tensors.names() for piece in self._tensors.pieces(name))
        return {self._filed(piece.name): piece.size for piece in found}

    def _held(self, kinds: Sequence[str], *, copied: bool) -> Iterator[Box]:
        for name in self._tensors.names():
            kept = {MODEL: self._tensors.parameter(name)}
            if len(kinds) > 1:
                kept |= self._tensors.moments(name)
            if self._tensors.is_writer(name):
                for kind, tensor in kept.items():
                    yield from self._boxes(kind, name, tensor.detach().to("cpu", copy=copied))

    def _begin(self, steps: int) -> None:
        self._tensors.begin(steps)

    def _take(self, boxes: Boxes, kinds: Sequence[str]) -> None:
        """Parameter by parameter, so that no more is held than one of them beside the model. Padding becomes 0."""
        for name in self._tensors.names():
            read = {kind: torch.zeros(self._tensors.shape(name)) for kind in kinds}
            boxes.read(box for kind, tensor in read.items() for box in self._boxes(kind, name, tensor))
            for kind, tensor in read.items():
                self._tensors.take(name, "parameter" if kind == MODEL else kind, tensor)

    def _boxes(self, kind: str, name: str, tensor: Tensor) -> Iterator[Box]:
        for piece in self._tensors.pieces(name):
            yield Box(f"{kind}/{self._filed(piece.name)}", piece.size, piece.offsets, piece.view(tensor))

    def _filed(self, name: str) -> str:
        return f"{self._body}.{name.removeprefix('model.')}" if name.startswith("model.") else name
