"""The checkpoint of a model in training: its tensors, its optimizer's moments, and its number of steps.

On one rank it is one file of tensors. Of several, each rank writes its parts under Hugging Face names, and any other
layout of ranks can read them, even one of another backend. `state.json` next to the tensors identifies their owner.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshrl.errors import ModelError
from meshrl_torch.checkpoint.boxes import Box, Boxes, write_boxes
from meshrl_torch.ranks.process_group import RankGroup
from meshrl_torch.train.optimizer import Optimizer

T = TypeVar("T")

MODEL: Final = "model"
"""The kind of the trained tensors, next to MOMENTS: a tensor's name in files is `KIND/NAME`."""
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""AdamW's state of each element."""

_FACTS: Final = "state.json"
_WHOLE: Final = "state.safetensors"
"""`model/NAME`: a tensor of the model. `model/float32/NAME`: a parameter's master. `exp_avg/NAME` and similar: AdamW's
state of a parameter."""
_SHARDS: Final = "shard-*-model-00001-of-00001.safetensors"
"""The file of each rank, by its number."""
_REMEDY: Final = "resume with the configuration that the checkpoint was written with, or start a run with another name"
_REMOVE: Final = "Remove the checkpoint that it belongs to, to resume from the one before"


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts about a model in training, besides its tensors."""

    role: str
    steps: int
    """Optimizer steps."""
    files: int | None = None
    """Number of files of tensors, if each rank writes one. A single rank omits it, as did older versions."""

    def write(self, folder: Path) -> None:
        """Write the file."""
        (folder / _FACTS).write_bytes(msgspec.json.encode(self))


class State(ABC):
    """A model in training. `read` restores what `write` wrote, bit for bit. Nothing is pickled."""

    def __init__(self, role: str) -> None:
        """`role`: owner of the state, for messages."""
        self._role = role
        self._thread = ThreadPoolExecutor(1, "meshrl-writing")
        self._last: Future[None] | None = None

    @abstractmethod
    def write(self, folder: str, wait: bool) -> None:
        """Write the state, or with `wait = False` copy it for a thread to write. All ranks call it together."""

    @abstractmethod
    def read(self, folder: str) -> None:
        """Load the written state. ModelError, and nothing changes, if it is of another role or model."""

    async def written(self) -> None:
        """Wait until the last copy is written. Raises its error."""
        if self._last is not None:
            await asyncio.wrap_future(self._last)

    def _write_later(self, work: Callable[[], None]) -> None:
        """Start work in the thread after the end of the previous one, whose error is dropped."""
        self._settle()
        self._last = self._thread.submit(work)

    def _settle(self) -> None:
        """Block until the previous work has ended, and drop its error."""
        if self._last is not None:
            wait([self._last])
            self._last = None


class TrainingState(State):
    """A model on one rank."""

    def __init__(
        self, role: str, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
    ) -> None:
        """`tensors`: the model's, and the optimizer's separate masters. `parameters`: those that are stepped over."""
        super().__init__(role)
        self._tensors, self._parameters, self._optimizer = tensors, parameters, optimizer

    def write(self, folder: str, wait: bool) -> None:
        """Copy the present state. A thread writes the copy, as two files in a new folder."""
        moments = {
            f"{kind}/{name}": value
            for name, parameter in self._parameters.items()  # one without a gradient so far has no moments
            for kind, value in self._adamw_state.get(parameter, {}).items()
        }
        own = {f"model/{name}": tensor for name, tensor in self._tensors.items()} | moments
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in own.items()}
        facts, path = Facts(self._role, self._optimizer.steps), Path(folder)

        def work() -> None:
            path.mkdir(parents=True, exist_ok=True)
            save_file(copies, path / _WHOLE)
            facts.write(path)

        self._write_later(work)

    def read(self, folder: str) -> None:
        """Load the written state. ModelError, and nothing changes, if it is of another role or model."""
        path = Path(folder)
        facts, saved = _opened(path, self._role, _WHOLE, lambda: load_file(path / _WHOLE))
        self._check(path, saved)
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(saved[f"model/{name}"])
        state = self._adamw_state
        state.clear()
        for full, value in saved.items():
            kind, _, name = full.partition("/")
            if kind != "model":
                # Separate memory for each: AdamW writes to its tensors, and parameters must not share `step`.
                copied = value.to(self._parameters[name].device, copy=True)
                state.setdefault(self._parameters[name], {})[kind] = copied
        self._optimizer.steps = facts.steps

    @property
    def _adamw_state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        adamw = self._optimizer._adamw  # noqa: SLF001 -- one package; AdamW stays hidden behind the optimizer
        return cast("dict[nn.Parameter, dict[str, Tensor]]", adamw.state)

    def _check(self, folder: Path, saved: Mapping[str, Tensor]) -> None:
        wanted = {f"model/{name}": tensor for name, tensor in self._tensors.items()}
        for full, tensor in saved.items():
            kind, _, name = full.partition("/")
            if kind != "model" and name in self._parameters:
                wanted[full] = tensor if kind == "step" else self._parameters[name]
        for name in sorted(wanted.keys() | saved.keys()):
            forms = [
                f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" if each is not None else "missing"
                for each in (saved.get(name), wanted.get(name))
            ]
            if forms[0] != forms[1]:
                raise _another_model(folder, self._role, name, *forms)


class SpreadState(State):
    """A model over several ranks, which can be read in another layout of ranks."""

    def __init__(self, role: str, ranks: RankGroup) -> None:
        super().__init__(role)
        self._ranks = ranks

    def write(self, folder: str, wait: bool) -> None:
        """Write a file for each rank, and one of facts. All ranks call it together.

        With `wait = False` it returns once the state is copied. A thread writes the copy, and `written` waits for it.
        """
        path = Path(folder)
        self._ranks.agree(lambda: path.mkdir(parents=True, exist_ok=True))
        self._settle()
        boxes: list[Box] = []

        def collect() -> bool:
            boxes.extend(self._held(_kinds(self._steps), copied=not wait))
            return bool(boxes)

        files = sum(self._ranks.agree(collect))
        work = partial(self._write, path, boxes, Facts(self._role, self._steps, files))
        if wait:
            self._ranks.agree(work)
        else:
            self._write_later(work)

    def read(self, folder: str) -> None:
        """Load what `write` wrote. ModelError, and nothing changes, if it is of another role or model.

        If a file cannot be read to its end, ModelError too, and a part may be loaded.
        """
        sizes = {name: size for each in self._ranks.agree(self._sizes) for name, size in each.items()}
        facts, boxes = self._ranks.together(lambda: self._open(Path(folder), sizes))
        self._begin(facts.steps)
        try:
            self._ranks.agree(lambda: self._take(boxes, _kinds(facts.steps)))
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

    def _write(self, folder: Path, boxes: Sequence[Box], facts: Facts) -> None:
        write_boxes(folder / _SHARDS.replace("*", f"{self._ranks.number + 1:05}"), boxes)
        if self._ranks.number == 0:
            facts.write(folder)

    def _open(self, path: Path, sizes: Mapping[str, tuple[int, ...]]) -> tuple[Facts, Boxes]:
        facts, boxes = _opened(path, self._role, _SHARDS, lambda: Boxes(path))
        if facts.files not in (None, len(boxes.files)):
            raise ModelError(f"{path} has the files of {len(boxes.files)} ranks and not of {facts.files}. {_REMOVE}")
        for name in boxes.sizes:
            if boxes.missing(name) or boxes.overlaps(name):
                raise ModelError(
                    f"{path} lacks a part of `{name.partition('/')[2]}`, or has it twice: a rank's file is missing or "
                    f"left over from another layout. {_REMOVE}"
                )
        here = {f"{kind}/{name}": size for kind in _kinds(facts.steps) for name, size in sizes.items()}
        for name in sorted(boxes.sizes.keys() | here.keys()):
            if boxes.sizes.get(name) != here.get(name):
                forms = [str(list(each[name])) if name in each else "missing" for each in (boxes.sizes, here)]
                raise _another_model(path, self._role, name, *forms)
        return facts, boxes


def _kinds(steps: int) -> tuple[str, ...]:
    return (MODEL, *(MOMENTS if steps else ()))


def _opened(folder: Path, role: str, pattern: str, read: Callable[[], T]) -> tuple[Facts, T]:
    """Return the facts in a folder, and the result of `read`. ModelError if one fails, or the role differs.

    `pattern`: matches this backend's files of tensors. ModelError if there are only others.
    """
    with suppress(OSError, msgspec.DecodeError):  # any backend's file names its role
        owner = msgspec.json.decode((folder / _FACTS).read_bytes(), type=Facts).role
        if owner not in ("", role):
            raise ModelError(f"{folder} is the state of a {owner}, not of a {role}; {_REMEDY}")
    files = sorted(each.name for each in folder.glob("*.safetensors"))
    if files and not any(fnmatch(name, pattern) for name in files):
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise ModelError(
            f"{folder} is the state of a {role} that another backend has written: it has {files[0]}{more}, and this "
            f"backend reads {pattern}. Nothing is wrong with the checkpoint: resume with the `backend` that it was "
            "written with, or start a run with another name"
        )
    try:
        return msgspec.json.decode((folder / _FACTS).read_bytes(), type=Facts), read()
    except (OSError, msgspec.DecodeError, SafetensorError, ValueError, KeyError) as error:
        raise ModelError(
            f"{folder} cannot be read as the state of a {role}: {type(error).__name__}: {error}. {_REMOVE}"
        ) from error


def _another_model(folder: Path, role: str, name: str, saved: str, here: str) -> ModelError:
    """Return the error for a tensor, `KIND/NAME`, whose form in files differs from that of the model."""
    return ModelError(
        f"{folder} is the state of another {role}: `{name.partition('/')[2]}` is {saved} there and {here} here; "
        f"{_REMEDY}"
    )
