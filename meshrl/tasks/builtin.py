"""The shipped reward functions: exact and numeric answers, the format of thoughts, and penalties for length."""

import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import cache, partial
from importlib import import_module
from itertools import chain, product
from typing import Final, SupportsFloat, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshrl.errors import shortened
from meshrl.tasks.cells import accepted
from meshrl.tasks.sources import Row

T = TypeVar("T")
_LARGEST: Final = float(np.finfo(np.float32).max)
_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"
_BOXED: Final = re.compile(r"\\f?box(?:ed)?\s*(\{)?")
_TAIL: Final = 4000
"""Characters at the end of a text in which its last number is looked for."""
_MARK: Final = "####"
_LONGEST: Final = 100
"""Most characters of a number. Longer ones are not answers."""
_PLAIN: Final = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_SIGNED: Final = rf"[-+]? ?(?:{_PLAIN})"
_NUMBER: Final = re.compile(
    rf"(?P<sign>[-+] ?)?[$€£]?(?P<sign2>[-+] ?)?(?:0x(?P<hex>[0-9a-fA-F]+)"
    rf"|(?:(?P<whole>\d+) ?)?\\frac(?:\{{(?P<over>{_SIGNED})\}}|(?P<over1>\d))"
    rf"(?:\{{(?P<under>{_SIGNED})\}}|(?P<under1>\d))"
    rf"|(?:(?P<mixed>\d+) )?(?P<top>\d+)/(?P<bottom>\d+)"
    rf"|(?P<decimal>{_PLAIN})(?:/(?P<below>\d+)|(?P<factorial>!)|[eE](?P<e>[-+]?\d+)|\^(?:\{{(?P<power>[-+]?\d+)\}}|(?P<power1>\d))"
    r"| ?\* ?10\^(?:\{(?P<ten>[-+]?\d+)\}|(?P<ten1>\d)))?)(?P<percent> ?%)?",
    re.ASCII,
)
_SPELLINGS: Final = (
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\[,!;: ()\[\]]|\\left|\\right|\*\*|\^ ?\{? ?\\(?:circ|degree) ?\}?|\\degree|°"), ""),
    (re.compile(r"\\(?:text|math)(?:rm|bf)?\{([^a-zA-Z{}]*)\}"), r"\1"),
    (re.compile(r"[\u2212\u2013]|\bminus\b"), "-"),
    (re.compile(r"\\times|\\cdot|\u00d7"), "*"),
    (re.compile(r"\\([%$])"), r"\1"),
)
_SCALES: Final = "(?i:dozen|hundred|thousand|million|billion|trillion)[sS]?"
_UNIT: Final = re.compile(
    rf"\s*(?:\\(?:text|mathrm|mbox|textrm)\{{(?! ?(?:(?i:or|and|to)|{_SCALES})\b)[^{{}}]*\}}"
    rf"|(?<=[\s%])(?!(?:(?i:pi|or|and|to|mod|over|squared|cubed)|{_SCALES}|[a-zA-Z])(?![a-zA-Z])(?<!\b[mgslhLNJWVAKCF]))"
    r"[a-zA-Z]+|(?<=\s)[mgslhLNJWVAKCF](?![a-zA-Z]))(?:\^\{?[23]\}?|[²³])?$"
)
_UNIT_WORD: Final = re.compile(r"[a-zA-Z]+(?:\^\{?[23]\}?|[²³])?[.,;!?$)]*")
_SCALE: Final = re.compile(rf"[^.,;:!?\s]\s+(?:\\\w+\{{ ?|\*+)?{_SCALES}\b")
"""The end of a number, and a word that multiplies it."""
_STATED: Final = re.compile(r"\banswer(?:\s+is\s*[:=]?|\s*[:=])\s*", re.IGNORECASE)
_GOES_ON: Final = re.compile(r"\.\d+\.\.")
"""A decimal that is rounded, as in 0.33..."""
_SENTENCE: Final = re.compile(r"[.!?](?:\s|$)|\n")
_BINARY: Final = re.compile(r"(?:[+*/^=<>\\-]|\\\w+)$")


def finite(value: object, what: str = "reward") -> float:
    """Return a number of a user as a float. TypeError or ValueError if it is none, or not a finite one of float32."""
    if value is None:
        raise TypeError(f"a {what} must be a number, not None: give 0.0 for a failure")
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a {what} must be a number, not {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a {what} must be finite, not {number}")
    if abs(number) > _LARGEST:
        raise ValueError(f"a {what} must be at most {_LARGEST:.4g} in size, since {what}s are float32, not {number:g}")
    return number


def exact_match(prompt: str, completion: str, row: Row) -> float:  # noqa: ARG001 -- the signature of a reward
    """Return 1.0 if the completion equals an accepted answer, except for surrounding white space, else 0.0."""
    answers = [*map(str.strip, accepted(row["answer"]))]
    if not answers:
        raise ValueError("the row has no answer to compare with")
    return float(completion.strip() in answers)


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

    The answer is the content of the last `\boxed{...}`, else the text after the last `####`, as in GSM8K, else what
    follows "answer is" or "Answer:", else the last number of the text. Text up to `</think>` does not count. A number
    is a decimal, a fraction, a mixed number, a power, or in scientific notation, with a sign, a currency or a unit. 50%
    equals 50 and 0.5. All else, such as 2x, \sqrt{2} or (1, 2), is no number: take `math_answer` for expressions. A
    completion that never ends its thought has no answer.
    """
    every, given = [wanted for each in accepted(row["answer"]) if (wanted := _final(each))], _final(completion)
    if not every:
        raise ValueError(
            f"the row's answer has no number to compare with: {shortened(row['answer'])}: take math_answer for "
            "expressions"
        )
    return float(given is not None and any(_equal(given, wanted) for wanted in every))


def _equal(one: tuple[Fraction, bool], other: tuple[Fraction, bool]) -> bool:
    (value, is_percent), (right, of_percent) = one, other
    scaled = is_percent != of_percent and (value / 100 if is_percent else value) == (
        right / 100 if of_percent else right
    )
    return value == right or scaled


def math_answer(prompt: str, completion: str, row: Row) -> float:  # noqa: ARG001 -- the signature of a reward
    r"""Return 1.0 if math-verify finds the answers of completion and row equal: numbers, expressions, sets, intervals.

    The row's answer is LaTeX, with or without dollar signs, or follows `####`. Text up to `</think>` does not count. It
    needs `pip install 'meshrl[maths]'`.
    """
    library = import_module("math_verify")  # an extra, and slow to import

    texts = [each.rpartition(_MARK)[2].strip() for each in accepted(row["answer"])]
    parsed = [library.parse(text if "$" in text or "\\boxed" in text else f"${text}$") for text in texts if text]
    if not any(parsed):
        raise ValueError(f"math-verify cannot read the row's answer {shortened(row['answer'])}: write it in LaTeX")
    _, close, answer = completion.rpartition(_CLOSE)
    if not close and _OPEN in completion:
        return 0.0
    slow: type[BaseException] = library.errors.TimeoutException
    given, too_slow = _result_or_none(partial(library.parse, answer, raise_on_error=True), slow)
    for right, mine in product(chain(*parsed), given or ()):
        is_equal, took_longer = _result_or_none(partial(library.verify, right, mine, raise_on_error=True), slow)
        if is_equal:
            return 1.0
        too_slow = too_slow or took_longer
    if too_slow:
        raise TimeoutError("math-verify gave up after 5 seconds: whether the answer is right is unknown")
    return 0.0


def _result_or_none(call: Callable[[], T], slow: type[BaseException]) -> tuple[T | None, bool]:
    """Return the result, None for what the library cannot read or compare, and whether it gave up after its time."""
    try:
        return call(), False
    except slow:
        return None, True
    except Exception as error:
        if "threaded environment" in str(error):
            raise
        return None, False


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
    found = _final(text)
    return found[0] if found else None


def _final(text: str) -> tuple[Fraction, bool] | None:
    """Return the number, and whether it is in percent."""
    _, close, answer = text.rpartition(_CLOSE)
    if not close and _OPEN in text:
        return None
    if boxes := [*_BOXED.finditer(answer)]:
        at = boxes[-1].end()
        return _number(
            _braced(answer, at) if boxes[-1][1] else answer[at:].split(maxsplit=1)[0] if answer[at:].strip() else ""
        )
    _, mark, after = answer.rpartition(_MARK)
    if stated := [*_STATED.finditer(after)]:
        after = after[stated[-1].end() :]
        after = _SENTENCE.split(after, maxsplit=1)[0]
    elif mark:
        after = after.strip().split("\n", 1)[0]
        first = after.split(maxsplit=1)[0] if after else ""
        return _number(after) or (None if _SCALE.match(after, len(first) - 1) else _number(first))
    return _number(after) or _last(after[-_TAIL:])


def _braced(text: str, start: int) -> str:
    """Return the text from here to the closing brace, or to the end if there is none."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return text[start:]


def _last(text: str) -> tuple[Fraction, bool] | None:
    """Return the number of the last words that hold a digit, if they are one."""
    words, after = _spelled(text).split(), ""
    while words and (_UNIT_WORD.fullmatch(words[-1]) or not any(map(str.isdigit, words[-1]))):
        after = words.pop()
    if words and _SCALE.match(f"{words[-1][-1]} {after}"):
        return None
    for size in (3, 2, 1):
        before, own = words[:-size], " ".join(words[-size:])
        if len(words) >= size and (found := _number(own)) is not None:
            follows = bool(before) and (_number(before[-1]) is not None and own[0] in "+-" and size > 1)
            return None if follows or (before and before[-1] != "=" and _BINARY.search(before[-1])) else found
    return None


def _spelled(text: str) -> str:
    """Write digits, fractions, signs and LaTeX in one way."""
    marks = [_digit(mark) if ord(mark) > 127 else mark for mark in text]
    text = "".join(marks)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    return text


def _digit(mark: str) -> str:
    made = unicodedata.decomposition(mark)
    if made.startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", mark).replace("\N{FRACTION SLASH}", "/")
    return str(unicodedata.digit(mark)) if unicodedata.category(mark) == "Nd" else mark


def _number(text: str) -> tuple[Fraction, bool] | None:
    """Return the number that the whole text is, with what may stand around it. None if it is no number."""
    if len(text) > 4 * _LONGEST or _GOES_ON.search(text):
        return None
    text = _spelled(text).strip().strip("*")
    text = text.removeprefix("$").removesuffix("$") if text.count("$") > 1 else text
    if text.count("=") == 1:
        text = text.partition("=")[2]
    text = text.strip().rstrip(".,;:?").strip().removesuffix("$")
    text = _UNIT.sub("", text).strip()
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > _LONGEST or (match["sign"] and match["sign2"]):
        return None
    value = _value(match)
    if value is None:
        return None
    return (-value if "-" in (match["sign"] or match["sign2"] or "") else value), bool(match["percent"])


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the number without its sign. None if it divides by zero or is too large."""
    if match["hex"]:
        return Fraction(int(match["hex"], 16))
    over, under = match["over"] or match["over1"] or match["top"], match["under"] or match["under1"] or match["bottom"]
    if over:
        below = _read(under)
        return Fraction(match["whole"] or match["mixed"] or 0) + _read(over) / below if below else None
    value = _read(match["decimal"])
    if match["below"]:
        return value / int(match["below"]) if int(match["below"]) else None
    if match["factorial"]:
        return Fraction(math.factorial(int(value))) if value.denominator == 1 and value <= _LONGEST else None
    exponent = next((match[name] for name in ("e", "ten", "ten1") if match[name]), None)
    power = match["power"] or match["power1"]
    if len(exponent or power or "") > 3 or (power and (value == 0 or len(match["decimal"]) > 9)):
        return None
    return value * Fraction(10) ** int(exponent) if exponent else value ** int(power) if power else value


def _read(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))
