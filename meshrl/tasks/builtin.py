"""The shipped reward functions: exact and numeric answers, the format of thoughts, and penalties for length."""

import math
import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Final, SupportsFloat, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl.tasks.sources import Row

_LARGEST: Final = float(np.finfo(np.float32).max)
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


def finite(value: object) -> float:
    """Return a user's reward as a float. TypeError or ValueError if it is not a finite number."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a reward must be a number, not {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward must be finite, not {number}")
    if abs(number) > _LARGEST:
        raise ValueError(f"a reward must be at most {_LARGEST:.4g} in size, since rewards are float32, not {number:g}")
    return number


def exact_match(prompt: str, completion: str, row: Row) -> float:  # noqa: ARG001 -- the signature of a reward
    """Return 1.0 if the completion equals the answer, except for surrounding white space, else 0.0."""
    answer = str(row["answer"]).strip()
    if not answer:
        raise ValueError("the row has no answer to compare with")
    return float(completion.strip() == answer)


def reasoning_gym(prompt: str, completion: str, row: Row) -> float:  # noqa: ARG001 -- the signature of a reward
    """Return the score of the row's reasoning_gym dataset for the completion, from 0 to 1."""
    metadata = row.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise ValueError("the row does not come from reasoning_gym: it has no metadata.source_dataset")
    return _scorer(str(metadata["source_dataset"]))(completion.strip(), row)


@cache
def _scorer(dataset: str) -> Callable[[str, Row], float]:
    import reasoning_gym as package  # noqa: PLC0415 -- an extra, and slow to import

    return cast("Callable[[str, Row], float]", package.get_score_answer_fn(dataset))


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


def overlong_penalty(lengths: ArrayLike, max_tokens: int, margin: int) -> NDArray[np.float32]:
    """Compute DAPO's penalty for long completions: 0 up to `max_tokens - margin` tokens, falling to -1 at `max_tokens`.

    `lengths`, int[rows], are numbers of learned tokens. Returns float32[rows], to be added to rewards. With
    `margin = 0`, only completions beyond `max_tokens` are penalised. DAPO (arXiv:2503.14476), equation 13, where
    `margin` is L_cache.
    """
    over = np.asarray(lengths, np.float64) - (max_tokens - margin)
    if margin == 0:
        return np.where(over > 0, -1, 0).astype(np.float32)
    return -np.clip(over / margin, 0, 1).astype(np.float32)


def final_number(text: str) -> Fraction | None:
    """Return the exact number that a text gives as its answer, in linear time. None if there is none."""
    _, close, answer = text.rpartition(_CLOSE)
    if not close and _OPEN in text:
        return None
    boxed = answer.rfind(_BOXED)
    if boxed >= 0:
        return _last(_braced(answer, boxed + len(_BOXED)))
    _, mark, after = answer.rpartition(_MARK)
    return _value(_NUMBER.search(_plain(after))) if mark else _last(answer)


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


def _plain(text: str) -> str:
    """Remove LaTeX's separators of thousands."""
    return text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")


def _value(match: re.Match[str] | None) -> Fraction | None:
    if match is None or len(match[0]) > _LONGEST:
        return None
    over = match["over"] or match["decimal"].replace(",", "")
    under = int(match["under"] or match["below"] or 1)
    return (-1 if match["sign"] else 1) * Fraction(over) / under if under else None
