"""Read a policy's broadcast in the process of an engine: whole tensors out of parts, for the engine's loader."""

import sys
from collections.abc import Callable, Iterable
from math import prod
from typing import Final, TypeAlias

import torch
from torch import Tensor

from meshrl_inference.engine import Outcome
from meshrl_inference.naming import Naming
from meshrl_torch.wire.collective import dtype_of, place_in
from meshrl_torch.wire.manifest import Offer, Part
from meshrl_torch.wire.reader import Damaged, Lost, Reader

LoadTensors: TypeAlias = Callable[[Iterable[tuple[str, Tensor]]], object]
"""The engine's loader of tensors by their names in files. It may keep them for a while."""


class Assembly:
    """Tensors that are loaded as soon as all of their layer are whole."""

    def __init__(
        self, offer: Offer, naming: Naming, device: torch.device, begin: Callable[[], object], load: LoadTensors
    ) -> None:
        """`device`: of the model. `begin`: called before the first tensor of each attempt."""
        self.device: Final = device
        self.begun = False
        """True if some of the model's tensors may be new."""
        self._offer, self._naming, self._begin, self._load = offer, naming, begin, load
        self._left: dict[str, int] = {}
        """Number of missing elements, by unit."""
        self._here: dict[str, dict[str, Tensor]] = {}
        """Tensors that are not all whole, by unit and name."""

    def begin(self) -> None:
        """Forget all parts, and get ready for others."""
        self._left.clear()
        self._here.clear()
        for name, shape in self._offer.sent.items():
            unit = self._naming.unit(name)
            self._left[unit] = self._left.get(unit, 0) + prod(shape)
        self.begun = True
        self._begin()

    def place(self, part: Part) -> Tensor:
        """Return a view of a part in its tensor, which is made for the first one."""
        here = self._here.setdefault(self._naming.unit(part.name), {})
        if part.name not in here:
            here[part.name] = torch.empty(part.size, dtype=dtype_of(part), device=self.device)
        return place_in(here[part.name], part)

    def arrived(self, part: Part) -> None:
        """Load a unit that is whole."""
        unit = self._naming.unit(part.name)
        self._left[unit] -= prod(part.shape)
        if not self._left[unit]:
            self._load(self._naming.in_files(self._here.pop(unit).items()))


def read(
    offer: Offer, together: int, naming: Naming, device: torch.device, begin: Callable[[], object], load: LoadTensors
) -> Outcome:
    """Read an offer into an engine's model, like all of the `together` processes that read it at once."""
    assembly = Assembly(offer, naming, device, begin, load)
    try:
        way = _reader.read(offer, together, assembly, _warn)
    except Lost as lost:
        return Outcome("", assembly.begun, lost.reason, lost.where)
    except Damaged as damaged:
        return Outcome("", assembly.begun, f"{damaged}. Publish them again")
    return Outcome(way, begun=True)


def _warn(attempt: int, error: str) -> None:
    sys.stderr.write(f"weights arrived incomplete, attempt {attempt}: {error}\n")


_reader: Final = Reader()
