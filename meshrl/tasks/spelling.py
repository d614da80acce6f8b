"""The built-in task: words to spell backward."""

import lzma
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from random import Random
from typing import Annotated, Final

from pydantic import Field

from meshrl.config import Config

NAME: Final = "meshrl:spell_backward"
Length = Annotated[int, Field(ge=3, le=8)]


class SpellingConfig(Config):
    """The keys of `task.options`. Equal options give the same rows as `spell_backward` of reasoning_gym."""

    min_word_len: Length = 3
    max_word_len: Length = 8
    size: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    seed: int = 0


def spelling_rows(config: SpellingConfig) -> Iterator[dict[str, object]]:
    """Yield rows with a `question`, an `answer` and the `word`, with replacement. None if no length is allowed."""
    words = [word for word in _words() if config.min_word_len <= len(word) <= config.max_word_len]
    for number in range(config.size if words else 0):
        word = Random(config.seed + number).choice(words)
        question = f"Spell this word backward (example: sun -> nus): {word}"
        yield {"question": question, "answer": word[::-1], "word": word}


@cache
def _words() -> list[str]:
    """Read the English words of 3 to 8 letters in reasoning_gym's list `words3to10.txt` (Apache License 2.0)."""
    return lzma.decompress(files("meshrl.tasks").joinpath("words.txt.xz").read_bytes()).decode().split()
