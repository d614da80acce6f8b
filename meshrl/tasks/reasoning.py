"""Rewards for reasoning: whether the last number is the answer, and whether thought and answer are separated."""

import re
from collections import deque
from fractions import Fraction
from typing import Final

from meshrl.tasks.sources import Row

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"
_BOXED: Final = "\\boxed{"
_MARK: Final = "####"
_LONGEST: Final = 100
"""Most characters of a number. Longer ones are not answers."""
_NUMBER: Final = re.compile(
    r"(?P<sign>(?<![\w.)\]}])[-\N{MINUS SIGN}][$€£]?)?"
    r"(?:\\[dt]?frac\{(?P<over>\d+)\}\{(?P<under>\d+)\}"
    r"|(?P<decimal>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![.,])\.\d+)(?:/(?P<below>\d+))?)",
    re.ASCII,
)
"""A sign belongs to the number after it, unless it is between two, as in 7 - 3 or 7-3."""


def numeric_answer(prompt: str, completion: str, row: Row) -> float:  # noqa: ARG001 -- the signature of a reward
    r"""Return 1.0 if the answers of completion and row are the same number: 1,234.50 is 1234.5, and 1/2 is .5.

    The answer is the content of the last `\boxed{...}`, else the text after the last `####`, as in GSM8K, else the last
    number of the text. Text up to `</think>` does not count. Units, currency signs and percent signs are ignored. A
    completion that never ends its thought has no answer.
    """
    wanted = final_number(str(row["answer"]))
    if wanted is None:
        raise ValueError("the row's answer has no number to compare with")
    return float(final_number(completion) == wanted)


def reasoning_format(prompt: str, completion: str, row: Row) -> float:  # noqa: ARG001 -- the signature of a reward
    """Return 1.0 for `<think>`, a thought, `</think>` and an answer, each once and in this order, else 0.0.

    The first tag may be missing, because some chat templates end with it.
    """
    thought, close, answer = completion.partition(_CLOSE)
    thought = thought.strip().removeprefix(_OPEN)
    tags = _OPEN in thought or _OPEN in answer or _CLOSE in answer
    return float(bool(close and thought.strip() and answer.strip()) and not tags)


def final_number(text: str) -> Fraction | None:
    """Return the exact number that a text gives as its answer, in linear time. None if there is none."""
    _, close, said = text.rpartition(_CLOSE)
    if not close and _OPEN in text:
        return None
    boxed = said.rfind(_BOXED)
    if boxed >= 0:
        return _last(_braced(said, boxed + len(_BOXED)))
    _, mark, after = said.rpartition(_MARK)
    return _first(after) if mark else _last(said)


def _braced(text: str, start: int) -> str:
    """Return the text from here to the closing brace, or to the end if there is none."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return text[start:]


def _last(text: str) -> Fraction | None:
    return _value(next(iter(deque(_NUMBER.finditer(_plain(text)), maxlen=1)), None))


def _first(text: str) -> Fraction | None:
    return _value(_NUMBER.search(_plain(text)))


def _plain(text: str) -> str:
    """Remove LaTeX's separators of thousands."""
    return text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")


def _value(found: re.Match[str] | None) -> Fraction | None:
    if found is None or len(found[0]) > _LONGEST:
        return None
    over, under = found["over"], found["under"] or found["below"]
    if over is None:
        over = found["decimal"].replace(",", "")
    if under is not None and int(under) == 0:
        return None
    return (-1 if found["sign"] else 1) * Fraction(over) / int(under or 1)
