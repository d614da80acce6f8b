"""The checkpoint of a model in training: its parameters in float32, AdamW's moments, and the number of steps.

Each rank writes its parts under Hugging Face names, and any other layout of ranks can read them, even one of another
backend. `state.json` next to the tensors identifies their owner.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from meshrl.errors import Damaged, ModelError
from meshrl_torch.checkpoint.boxes import Box, Boxes, write_boxes
from meshrl_torch.ranks.process_group import RankGroup
from meshrl_torch.train.optimizer import MOMENTS, Optimizer, Stepper

MODEL: Final = "model"
"""The kind of the trained tensors, next to MOMENTS: a tensor's name in files is `KIND/NAME`."""

FACTS: Final = "state.json"
"""The file of facts, in each state."""
_SHARD: Final = "shard-{:05}-model-00001-of-00001.safetensors"
"""The file of each rank, by its number from 1."""
_REMEDY: Final = "resume with the configuration that the checkpoint was written with, or start a run with another name"
_REMOVE: Final = "Remove the checkpoint that it belongs to, to resume from the one before"


class ModelFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts about a model in training, besides its tensors."""

    role: str
    steps: int
    """Optimizer steps."""
    files: int
    """Number of files of tensors."""
    late: Mapping[str, int] = {}
    """Steps of each parameter that had no gradient in some of them."""
    alpha: int | None = None
    """Of an adapter, `LoraConfig.alpha`: what its weights mean depends on it."""


class State(ABC):
    """A model in training, which can be read in another layout of ranks, bit for bit. Nothing is pickled."""

    def __init__(self, role: str, ranks: RankGroup, optimizer: Stepper) -> None:
        """`role`: owner of the state, for messages."""
        self._role, self._ranks, self._stepper = role, ranks, optimizer
        self._thread = ThreadPoolExecutor(1, "meshrl-writing")
        self._last: Future[None] | None = None
        self._reads_model = False
        """True if the thread writes the model's own tensors, not a copy."""
        self.alpha: int | None = None
        """See `ModelFacts.alpha`."""

    def write(self, folder: str, wait: bool) -> None:
        """Begin to write a file for each rank, and one of facts. All ranks call it together. A thread of each writes.

        With `wait = False` it writes a copy of the state. With `wait = True` it writes the state itself: call `keep`
        before it changes.
        """
        path, steps = Path(folder), self._stepper.steps
        self._ranks.agree(lambda: path.mkdir(parents=True, exist_ok=True))
        self._settle()
        boxes: list[Box] = []

        def collect() -> bool:
            boxes.extend(self._held(_kinds(steps), copied=not wait))
            return bool(boxes)

        facts = ModelFacts(self._role, steps, sum(self._ranks.agree(collect)), self._late(), self.alpha)
        self._last, self._reads_model = self._thread.submit(self._write, path, boxes, facts), wait

    async def written(self) -> None:
        """Wait until the state is written. Raises its error. If this is cancelled, the thread writes on."""
        last = self._last
        await self.ended()
        if last is not None:
            last.result()

    async def ended(self) -> None:
        """Wait until the thread has ended its work, whatever came of it."""
        if self._last is not None:
            end = asyncio.wrap_future(self._last)
            end.add_done_callback(asyncio.Future.exception)  # `written` raises it, if anybody still asks
            await asyncio.wait([end])

    def keep(self) -> None:
        """Block until nobody reads the model's own tensors any more, which are about to change."""
        if self._last is not None and self._reads_model:
            wait([self._last])

    def read(self, folder: str, *, optimizer: bool = True) -> None:
        """Load what `write` wrote, or its weights alone. ModelError, and nothing changes, if it is of another model.

        If a file is damaged (Damaged) or cannot be read to its end (ModelError), a part may be loaded.
        """
        facts, boxes = self._opened(folder)
        if not optimizer:
            facts = msgspec.structs.replace(facts, steps=0, late={})
        self._begin(facts)
        try:
            self._ranks.agree(lambda: self._take(boxes, _kinds(facts.steps)))
        except (Damaged, ModelError) as error:
            raise type(error)(
                f"{error}. The {self._role} has loaded a part of it and cannot be used: restore it again, or spawn it "
                "again"
            ) from error

    def check(self, folder: str) -> None:
        """Raise ModelError if `read` would before it changes anything. All ranks call it together."""
        self._opened(folder)

    def _opened(self, folder: str) -> tuple[ModelFacts, Boxes]:
        sizes = {name: size for each in self._ranks.agree(self._sizes) for name, size in each.items()}
        return self._ranks.together(lambda: self._open(Path(folder), sizes))

    @abstractmethod
    def _sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the sizes of the whole tensors of this rank's parts, by their names in files without the kind."""

    @abstractmethod
    def _held(self, kinds: Sequence[str], *, copied: bool) -> Iterable[Box]:
        """Yield the boxes that this rank writes, in the host's memory. All ranks together write each element once."""

    def _late(self) -> Mapping[str, int]:
        """Return `ModelFacts.late`."""
        return {}

    @abstractmethod
    def _begin(self, facts: ModelFacts) -> None:
        """Set the number of steps, before moments are loaded. After 0 steps there are none.

        ModelError on all ranks, and nothing changes, if the backend cannot continue from these facts.
        """

    @abstractmethod
    def _take(self, boxes: Boxes, kinds: Sequence[str]) -> None:
        """Read this rank's parts."""

    def _settle(self) -> None:
        """Block until the thread has written the previous state, and drop its error."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    def _write(self, folder: Path, boxes: Sequence[Box], facts: ModelFacts) -> None:
        write_boxes(folder / _SHARD.format(self._ranks.number + 1), boxes)
        if self._ranks.number == 0:
            (folder / FACTS).write_bytes(msgspec.json.encode(facts))

    def _open(self, path: Path, sizes: Mapping[str, tuple[int, ...]]) -> tuple[ModelFacts, Boxes]:
        """Return the facts and tensors in a folder. ModelError if they are of another role or model, or not whole."""
        try:
            facts = msgspec.json.decode((path / FACTS).read_bytes(), type=ModelFacts)
            if facts.role != self._role:
                raise ModelError(f"{path} is the state of a {facts.role}, not of a {self._role}; {_REMEDY}")
            boxes = Boxes(path)
        except (OSError, msgspec.DecodeError, SafetensorError, ValueError, KeyError) as error:
            raise ModelError(
                f"{path} cannot be read as the state of a {self._role}: {type(error).__name__}: {error}. {_REMOVE}"
            ) from error
        if facts.files != len(boxes.files):
            raise ModelError(f"{path} has the files of {len(boxes.files)} ranks and not of {facts.files}. {_REMOVE}")
        for name in boxes.sizes:
            if not boxes.is_whole(name):
                raise ModelError(
                    f"{path} lacks a part of `{name.partition('/')[2]}`, or has it twice: a rank's file is missing or "
                    f"left over from another layout. {_REMOVE}"
                )
        here = {f"{kind}/{name}": size for kind in _kinds(facts.steps) for name, size in sizes.items()}
        for name in sorted(boxes.sizes.keys() | here.keys()):
            if boxes.sizes.get(name) != here.get(name):
                forms = [str(list(each[name])) if name in each else "missing" for each in (boxes.sizes, here)]
                raise ModelError(
                    f"{path} is the state of another {self._role}: `{name.partition('/')[2]}` is {forms[0]} there and "
                    f"{forms[1]} here; {_REMEDY}"
                )
        if None not in (facts.alpha, self.alpha) and facts.alpha != self.alpha:
            raise ModelError(
                f"{path} is the state of another {self._role}: its adapter has alpha = {facts.alpha}, and here it has "
                f"alpha = {self.alpha}, with which the same weights have another effect; {_REMEDY}"
            )
        return facts, boxes


class TrainingState(State):
    """A model whose parameters AdamW steps over, whole or in a rank's shards."""

    def __init__(self, role: str, ranks: RankGroup, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        """`parameters`: those that the optimizer steps over, in its order, by name."""
        super().__init__(role, ranks, optimizer)
        self._parameters, self._optimizer = parameters, optimizer

    def _sizes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def _held(self, kinds: Sequence[str], *, copied: bool) -> Iterator[Box]:
        for box in self._boxes(kinds, self._written_here()):
            yield replace(box, tensor=box.tensor.to("cpu", copy=copied))

    def _late(self) -> Mapping[str, int]:
        counts = zip(self._parameters, self._optimizer.counts(), strict=True)
        return {name: count for name, count in counts if count != self._optimizer.steps}

    def _begin(self, facts: ModelFacts) -> None:
        self._optimizer.begin(facts.steps, [facts.late.get(name, facts.steps) for name in self._parameters])

    def _take(self, boxes: Boxes, kinds: Sequence[str]) -> None:
        boxes.read(self._boxes(kinds, self._parameters))
        self._optimizer.round()

    def _boxes(self, kinds: Sequence[str], names: Collection[str]) -> Iterator[Box]:
        """Yield this rank's parts, as views of the model and its moments."""
        for kind in kinds:
            own = self._optimizer.masters if kind == MODEL else self._optimizer.moments(kind)
            for (name, parameter), part in zip(self._parameters.items(), own, strict=True):
                if name in names:
                    yield from self._placed(f"{kind}/{name}", parameter, part.detach())

    def _placed(self, name: str, parameter: Tensor, part: Tensor) -> Iterator[Box]:
        """Yield this rank's part of a parameter, or of a moment of it, with its place. Nothing if it is empty."""
        yield Box(name, tuple(part.shape), (0,) * part.dim(), part)

    def _written_here(self) -> Collection[str]:
        """Return the names of the parameters that this rank writes."""
        return self._parameters


def _kinds(steps: int) -> tuple[str, ...]:
    return (MODEL, *(MOMENTS if steps else ()))
