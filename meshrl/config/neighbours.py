"""The names of configuration keys of TRL, verl, OpenRLHF and torchforge in meshrl."""

import tomllib
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from meshrl.config.base import Keys, dotted

_FILE: Final = Path(__file__).with_name("neighbours.toml")


class Counterpart(msgspec.Struct, frozen=True):
    """What a key of another project's is here."""

    keys: tuple[str, ...] = ()
    """Ours, the first that an algorithm has; `*` is each backend with the option. None: there is no such setting."""
    say: str = ""
    """What one needs to know beside it."""

    def told(self, name: str, known: Collection[str] | None) -> str:
        """An answer to who wrote `name`; `known`: the keys of the configuration that it stands in, if one can tell."""
        there = ([key for key in known or () if fnmatchcase(key, each)] for each in self.keys)
        found = sorted(next(filter(None, there), ()))
        ours = "` or `".join(found or self.keys[:1])
        beside = name.rpartition(".")[0] + "." + ours.rpartition(".")[2]
        ours = beside if known is not None and beside in known else ours  # of the table that it stands in
        answer = f"`{name}` is `{ours}` here" if ours else f"there is no `{name}` here"
        if ours and not found and known is not None:
            answer += ", which this algorithm does not have"
        return answer + (self.say and f": {self.say}")


@cache
def neighbours() -> Mapping[str, Mapping[str, Counterpart]]:
    """By project, the keys of its configurations, as many of their last parts as tell them apart."""
    tables = tomllib.loads(_FILE.read_text("utf-8"))
    return {project: {name: _counterpart(entry) for name, entry in words.items()} for project, words in tables.items()}


def answers(path: Keys, value: object, known: Collection[str] | None = None) -> list[str]:
    """What a key is called here, or each key of a table below it; nothing where no neighbour has it.

    `known`: the keys of the configuration that it stands in.
    """
    found: list[str] = []
    for leaf in _leaves(path, value):
        parts = dotted(leaf).split(".")
        names = (".".join(parts[start:]) for start in range(len(parts)))
        word = next((words[name] for name in names for words in neighbours().values() if name in words), None)
        if word:
            found.append(word.told(dotted(leaf), known))
    return found


def _leaves(path: Keys, value: object) -> Iterator[Keys]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves((*path, str(key)), below)
    else:
        yield path


def _counterpart(entry: object) -> Counterpart:
    if not isinstance(entry, Mapping):
        return Counterpart((str(entry),))
    keys = entry.get("key", [])
    return Counterpart((keys,) if isinstance(keys, str) else tuple(keys), str(entry.get("say", "")))
