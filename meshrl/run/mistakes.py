"""Mistakes in a configuration, each reported once, with its origin: the file or the command line."""

import re
from collections.abc import Sequence
from pathlib import Path

from meshrl.config import as_list


def list_of_mistakes(source: Path, mistakes: Sequence[str], overrides: Sequence[str] = ()) -> str:
    """Return the findings of `find_mistakes` in a configuration as one text.

    The same mistake of several keys, such as a model that roles share, is reported once with all keys. A mistake in the
    value of an override is attributed to the command line.
    """
    keys: dict[str, list[str]] = {}
    for mistake in mistakes:
        key, _, text = mistake.partition(": ")
        keys.setdefault(text, []).append(key)
    return as_list(
        [
            f"{'command line' if any(_gave(each, key, text) for each in overrides for key in of) else source}: "
            f"{', '.join(of)}: {text}"
            for text, of in keys.items()
        ]
    )


def _gave(override: str, key: str, text: str) -> bool:
    """True if a mistake at a key comes from an override of it or below it, or names the override itself."""
    given, value = (each.strip() for each in override.split("=", 1))
    bare = value.strip("\"'")
    if f"{given} = {value}" in text or f"{given} = {bare!r}" in text:
        return True
    at = re.search(rf"(?<!\w){re.escape(bare)}(?!\w)", text) if bare else None
    return at is not None and f"{given}.".startswith(f"{key}.")
