"""What a checkpoint keeps of a model that Megatron-Core trains: each rank writes its parts under Hugging Face names.

So a checkpoint of any layout of ranks is read by any other, also by that of the backend fsdp.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from meshrl.errors import ModelError
from meshrl_hf.boxes import Box, Boxes, write_boxes
from meshrl_hf.writing import Writing
from meshrl_megatron.naming import Piece

MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each element."""

_NUMBERS: Final = "state.json"
_REMEDY: Final = "go on with the configuration that the checkpoint was written with, or start a run of another name"
_REMOVE: Final = "Remove the checkpoint that it belongs to, to go on from the one before"

T = TypeVar("T")


class _Numbers(msgspec.Struct, frozen=True):
    role: str
    steps: int
    files: int | None = None
    """Of ranks. A checkpoint of another backend does not say it."""


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


class Agreeing(Protocol):
    """The ranks that share a model."""

    @property
    def number(self) -> int:
        """This rank's, among all."""
        ...

    def agree(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on each rank, on all of them. Where it raises on one, all raise."""
        ...


class State:
    """A model in training. What `write` keeps, `read` puts back, to the bit, also in another layout of ranks."""

    def __init__(self, role: str, tensors: Tensors, ranks: Agreeing, body: str = "model") -> None:
        """`body`: what stands before the names of the decoder's tensors. Other backends write "body" for a critic."""
        self._role, self._tensors, self._ranks, self._body = role, tensors, ranks, body
        self._writing = Writing()

    def write(self, folder: str, wait: bool) -> None:
        """Write a file for each rank, and one of numbers. All ranks do it at once.

        With `wait = False` it returns when the state is copied, and a thread writes the copy: `written` tells the end.
        """
        path = Path(folder)
        self._ranks.agree(lambda: path.mkdir(parents=True, exist_ok=True))
        self._writing.settle()
        boxes = list(self._held(copied=not wait))
        files = sum(self._ranks.agree(lambda: bool(boxes)))
        work = partial(self._write, path, boxes, _Numbers(self._role, self._tensors.steps, files))
        if wait:
            self._ranks.agree(work)
        else:
            self._writing.begin(work)

    async def written(self) -> None:
        """Wait until this rank's last copy is written. Raises what went wrong."""
        await self._writing.written()

    def read(self, folder: str) -> None:
        """Take what `write` wrote; ModelError, and nothing taken, where it is of another role or model.

        ModelError too where a file cannot be read to its end: then part of it is taken.
        """
        sizes = {name: size for each in self._ranks.agree(self._sizes) for name, size in each.items()}
        opened: list[tuple[_Numbers, Boxes]] = []
        self._ranks.agree(lambda: opened.append(self._open(Path(folder), sizes)))
        numbers, boxes = opened[0]
        self._tensors.begin(numbers.steps)
        try:
            self._ranks.agree(lambda: self._take(boxes, numbers.steps))
        except ModelError as error:
            raise ModelError(
                f"{error}. The {self._role} has taken a part of it, and is of no use now: restore it again, or spawn "
                "it anew"
            ) from error

    def _held(self, copied: bool) -> Iterator[Box]:
        """What this rank writes, in the host's memory."""
        for name in self._tensors.names():
            kept = {"model": self._tensors.parameter(name)}
            if self._tensors.steps:
                kept |= self._tensors.moments(name)
            if self._tensors.is_writer(name):
                for kind, tensor in kept.items():
                    yield from self._boxes(kind, name, tensor.detach().to("cpu", copy=copied))

    def _boxes(self, kind: str, name: str, tensor: Tensor) -> Iterator[Box]:
        for piece in self._tensors.pieces(name):
            yield Box(f"{kind}/{self._filed(piece.name)}", piece.size, piece.offsets, piece.view(tensor))

    def _filed(self, name: str) -> str:
        return f"{self._body}.{name.removeprefix('model.')}" if name.startswith("model.") else name

    def _write(self, folder: Path, boxes: Sequence[Box], numbers: _Numbers) -> None:
        write_boxes(folder / f"shard-{self._ranks.number + 1:05}-model-00001-of-00001.safetensors", boxes)
        if self._ranks.number == 0:
            (folder / _NUMBERS).write_bytes(msgspec.json.encode(numbers))

    def _take(self, boxes: Boxes, steps: int) -> None:
        """Parameter by parameter, so that no more is held than one of them beside the model. Padding becomes 0."""
        for name in self._tensors.names():
            kinds = ("model", *(MOMENTS if steps else ()))
            read = {kind: torch.zeros(self._tensors.shape(name)) for kind in kinds}
            boxes.read(box for kind, tensor in read.items() for box in self._boxes(kind, name, tensor))
            for kind, tensor in read.items():
                self._tensors.take(name, "parameter" if kind == "model" else kind, tensor)

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole tensors that this rank has a part of."""
        found = (piece for name in self._tensors.names() for piece in self._tensors.pieces(name))
        return {self._filed(piece.name): piece.size for piece in found}

    def _open(self, path: Path, sizes: Mapping[str, tuple[int, ...]]) -> tuple[_Numbers, Boxes]:
        try:
            numbers = msgspec.json.decode((path / _NUMBERS).read_bytes(), type=_Numbers)
            boxes = Boxes(path)
        except (OSError, msgspec.DecodeError, SafetensorError, ValueError, KeyError) as error:
            raise ModelError(
                f"{path} cannot be read as the state of a {self._role}: {type(error).__name__}: {error}. {_REMOVE}"
            ) from error
        if numbers.role != self._role:
            raise ModelError(f"{path} is the state of a {numbers.role}, not of a {self._role}; {_REMEDY}")
        if numbers.files not in (None, len(boxes.files)):
            raise ModelError(f"{path} has the files of {len(boxes.files)} ranks and not of {numbers.files}. {_REMOVE}")
        for name in boxes.sizes:
            if boxes.missing(name) or boxes.overlaps(name):
                raise ModelError(
                    f"{path} lacks a part of `{name.partition('/')[2]}`, or has it twice: a rank's file is missing or "
                    f"left over from another layout. {_REMOVE}"
                )
        kinds = ("model", *(MOMENTS if numbers.steps else ()))
        here = {f"{kind}/{name}": size for kind in kinds for name, size in sizes.items()}
        for name in sorted(boxes.sizes.keys() | here.keys()):
            if boxes.sizes.get(name) != here.get(name):
                there, own = (_told(each.get(name)) for each in (boxes.sizes, here))
                raise ModelError(
                    f"{path} is the state of another {self._role}: `{name.partition('/')[2]}` is {there} there and "
                    f"{own} here; {_REMEDY}"
                )
        return numbers, boxes


def _told(size: tuple[int, ...] | None) -> str:
    return "missing" if size is None else str(list(size))
