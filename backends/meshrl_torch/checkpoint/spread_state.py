"""The checkpoint of a model over several ranks: each rank writes its parts under Hugging Face names.

Any other layout of ranks can read it, even one of another backend.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from meshrl.errors import ModelError
from meshrl_torch.checkpoint.boxes import Box, Boxes, write_boxes
from meshrl_torch.checkpoint.numbers import REMOVE, Numbers, another, opened
from meshrl_torch.checkpoint.writing import Writing
from meshrl_torch.ranks.rank_group import RankGroup

MODEL: Final = "model"
"""The kind of the trained tensors, next to MOMENTS: a tensor's name in files is `KIND/NAME`."""
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""AdamW's state of each element."""

_FILES: Final = "shard-*-model-00001-of-00001.safetensors"
"""The file of each rank, by its number."""


class SpreadState(ABC):
    """A model in training. `read` restores what `write` wrote, bit for bit, also in another layout of ranks."""

    def __init__(self, role: str, ranks: RankGroup) -> None:
        """`role`: owner of the state, for messages."""
        self._role, self._ranks = role, ranks
        self._writing = Writing()

    def write(self, folder: str, wait: bool) -> None:
        """Write a file for each rank, and one of numbers. All ranks call it together.

        With `wait = False` it returns once the state is copied. A thread writes the copy, and `written` waits for it.
        """
        path = Path(folder)
        self._ranks.agree(lambda: path.mkdir(parents=True, exist_ok=True))
        self._writing.settle()
        boxes: list[Box] = []

        def collect() -> bool:
            boxes.extend(self._held(_kinds(self._steps), copied=not wait))
            return bool(boxes)

        files = sum(self._ranks.agree(collect))
        work = partial(self._write, path, boxes, Numbers(self._role, self._steps, files))
        if wait:
            self._ranks.agree(work)
        else:
            self._writing.begin(work)

    async def written(self) -> None:
        """Wait until this rank's last copy is written. Raises its error."""
        await self._writing.written()

    def read(self, folder: str) -> None:
        """Load what `write` wrote. ModelError, and nothing changes, if it is of another role or model.

        If a file cannot be read to its end, ModelError too, and a part may be loaded.
        """
        sizes = {name: size for each in self._ranks.agree(self._sizes) for name, size in each.items()}
        found: list[tuple[Numbers, Boxes]] = []
        self._ranks.agree(lambda: found.append(self._open(Path(folder), sizes)))
        numbers, boxes = found[0]
        self._begin(numbers.steps)
        try:
            self._ranks.agree(lambda: self._take(boxes, _kinds(numbers.steps)))
        except ModelError as error:
            raise ModelError(
                f"{error}. The {self._role} has loaded a part of it and cannot be used: restore it again, or spawn it "
                "again"
            ) from error

    @property
    @abstractmethod
    def _steps(self) -> int:
        """Return the number of optimizer steps."""

    @abstractmethod
    def _sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the sizes of the whole tensors of this rank's parts, by their names in files without the kind."""

    @abstractmethod
    def _held(self, kinds: Sequence[str], *, copied: bool) -> Iterable[Box]:
        """Yield the boxes that this rank writes, in the host's memory. All ranks together write each element once."""

    @abstractmethod
    def _begin(self, steps: int) -> None:
        """Set the number of steps, before moments are loaded. After 0 steps there are none."""

    @abstractmethod
    def _take(self, boxes: Boxes, kinds: Sequence[str]) -> None:
        """Read this rank's parts."""

    def _write(self, folder: Path, boxes: Sequence[Box], numbers: Numbers) -> None:
        write_boxes(folder / _FILES.replace("*", f"{self._ranks.number + 1:05}"), boxes)
        if self._ranks.number == 0:
            numbers.write(folder)

    def _open(self, path: Path, sizes: Mapping[str, tuple[int, ...]]) -> tuple[Numbers, Boxes]:
        numbers, boxes = opened(path, self._role, _FILES, lambda: Boxes(path))
        if numbers.files not in (None, len(boxes.files)):
            raise ModelError(f"{path} has the files of {len(boxes.files)} ranks and not of {numbers.files}. {REMOVE}")
        for name in boxes.sizes:
            if boxes.missing(name) or boxes.overlaps(name):
                raise ModelError(
                    f"{path} lacks a part of `{name.partition('/')[2]}`, or has it twice: a rank's file is missing or "
                    f"left over from another layout. {REMOVE}"
                )
        here = {f"{kind}/{name}": size for kind in _kinds(numbers.steps) for name, size in sizes.items()}
        for name in sorted(boxes.sizes.keys() | here.keys()):
            if boxes.sizes.get(name) != here.get(name):
                there, own = (_told(each.get(name)) for each in (boxes.sizes, here))
                raise another(path, self._role, name, there, own)
        return numbers, boxes


def _kinds(steps: int) -> tuple[str, ...]:
    return (MODEL, *(MOMENTS if steps else ()))


def _told(size: tuple[int, ...] | None) -> str:
    return "missing" if size is None else str(list(size))
