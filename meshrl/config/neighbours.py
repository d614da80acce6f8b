"""The names of configuration keys of TRL, verl, OpenRLHF and torchforge in meshrl."""

import tomllib
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from meshrl.config.base import Keys, dotted, leaves

_FILE: Final = Path(__file__).with_name("neighbours.toml")


class Counterpart(msgspec.Struct, frozen=True):
    """The counterpart of another project's key."""

    keys: tuple[str, ...] = ()
    """Our keys. The first that the algorithm has counts. `*` stands for each backend with the option. Empty if there is
    no such setting."""
    say: str = ""
    """Additional advice."""

    def hint(self, name: str, known: Collection[str] | None) -> str:
        """The hint for a user who wrote `name`. `known`: the keys of the surrounding configuration, if known."""
        matches = ([key for key in known or () if fnmatchcase(key, each)] for each in self.keys)
        found = sorted(next(filter(None, matches), ()))
        ours = "` or `".join(found or self.keys[:1])
        beside = name.rpartition(".")[0] + "." + ours.rpartition(".")[2]
        ours = beside if known is not None and beside in known else ours  # of the table that contains the key
        answer = f"`{name}` is `{ours}` here" if ours else f"there is no `{name}` here"
        if ours and not found and known is not None:
            answer += ", which this algorithm does not have"
        return answer + (self.say and f": {self.say}")


@cache
def neighbours() -> Mapping[str, Mapping[str, Counterpart]]:
    """The keys of other projects' configurations by project, with as many last parts as make them unique."""
    tables = tomllib.loads(_FILE.read_text("utf-8"))
    return {project: {name: _counterpart(entry) for name, entry in words.items()} for project, words in tables.items()}


def counterparts(path: Keys, value: object, known: Collection[str] | None = None) -> list[str]:
    """Return our name of a key, or of each key of a table below it. Empty if no other project has the key.

    `known`: the keys of the surrounding configuration.
    """
    hints: list[str] = []
    for leaf, _ in leaves(value, path):
        parts = dotted(leaf).split(".")
        names = (".".join(parts[start:]) for start in range(len(parts)))
        word = next((words[name] for name in names for words in neighbours().values() if name in words), None)
        if word:
            hints.append(word.hint(dotted(leaf), known))
    return hints


def _counterpart(entry: object) -> Counterpart:
    if not isinstance(entry, Mapping):
        return Counterpart((str(entry),))
    keys = entry.get("key", [])
    return Counterpart((keys,) if isinstance(keys, str) else tuple(keys), str(entry.get("say", "")))
