"""A change of the product, as the data files of this folder describe it."""

from pathlib import Path
from typing import Final

import msgspec

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
ROOMS: Final = {
    **{room: f"meshrl/{room}" for room in ("mesh", "data", "losses", "objectives", "weights")},
    "rollout": "meshrl/overlap",
    "checkpoints": "meshrl/run/checkpoints.py",
}
"""The folder or the file of each room that mutants are drawn from."""


class Mutant(msgspec.Struct, frozen=True, omit_defaults=True):
    """Lines of a file from number `line`, from 1, and what takes their place.

    `room`: one of `ROOMS`, or of a planted fault the part of the backends and engines. `operator`: cosmic-ray's name of
    the change, or "planted". `wrong`: what is wrong with the product then, for a planted fault.
    """

    id: str
    room: str
    file: str
    function: str
    line: int
    operator: str
    old: list[str]
    new: list[str]
    wrong: str = ""

    def applied(self, text: str) -> str:
        """Return the file with the new lines. ValueError if the old ones are not there, or at several other places."""
        lines, size = text.split("\n"), len(self.old)
        places = [at for at in range(len(lines)) if lines[at : at + size] == self.old]
        if self.line - 1 in places:
            places = [self.line - 1]
        if len(places) != 1:
            raise ValueError(f"{self.id} does not apply: its old lines are at {len(places)} places of {self.file}")
        return "\n".join([*lines[: places[0]], *self.new, *lines[places[0] + size :]])


def mutants() -> list[Mutant]:
    """Return those that were drawn, then those that were planted by hand."""
    files = (HERE / "drawn.json", HERE / "planted.json")
    return [each for file in files for each in msgspec.json.decode(file.read_bytes(), type=list[Mutant])]
