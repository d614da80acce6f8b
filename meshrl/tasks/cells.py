"""The cells of rows, which are what JSON holds, and the templates that make texts of them."""

import math
import string
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Final, TypeAlias, cast

import numpy as np

from meshrl.errors import DataError, did_you_mean, shortened

Answer: TypeAlias = str | list[str]
"""A row's answer, or all answers that are accepted."""

_MISSING: Final = ("NAType", "NaTType")
"""The types of what pandas calls a missing value."""
_FORMATTER: Final = string.Formatter()
_EXACT: Final = 1e16
"""From here on, Python writes a number with an exponent."""


def plain(value: object, where: str) -> object:
    """Return a value as JSON holds it: NaN as null, an array as a list. DataError for what JSON cannot hold."""
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return value
    if isinstance(value, np.floating):
        value = float(str(value))  # float32's 0.1 stays 0.1
    elif tolist := getattr(value, "tolist", None):
        value = list(value) if isinstance(value, np.ndarray) and value.ndim else tolist()
    if kind.__name__ in _MISSING or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, list | tuple):
        return [plain(each, where) for each in cast("Sequence[object]", value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(each, f"{where}[{key}]") for key, each in cast("Mapping[str, object]", value).items()}
    if not isinstance(value, str | bool | int | float) or value in (math.inf, -math.inf):
        raise DataError(
            f"{where} is {shortened(value)}, of the type {kind.__name__}: rows are of texts, finite numbers, true, "
            "false, null, lists, and tables with texts as keys. Write it as text, or leave the column out"
        )
    return value


def accepted(answer: object) -> list[str]:
    """Return the text of an answer, or of each answer of a list, without those that are null or blank."""
    every = cast("Sequence[object]", answer) if isinstance(answer, list | tuple) else [answer]
    return [text for each in every if (text := str(_written(each))).strip()]


def fill(template: str, row: Mapping[str, object], where: str, remedy: str = "") -> str:
    """Fill a template with the row's values: null is no text, and a whole number has no decimals.

    Raises DataError, which names `where`, if the template does not fit the row, the row lacks a key, or the value is a
    table or a list that is not of numbers. `remedy`: what to do about a lacking key.
    """
    with fitting(template, row, where, remedy):
        text = "".join([_filled(row, *piece) for piece in parsed(template)])
        if not text.isascii():
            text.encode()
        return text


def fill_accepted(template: str, row: Mapping[str, object], where: str, remedy: str = "") -> Answer:
    """Fill a template like `fill`. One that is a single key with a list gives the text of each of its values."""
    with fitting(template, row, where, remedy):
        if key := only_key(template):
            value, _ = _FORMATTER.get_field(key, (), row)
            if isinstance(value, list):
                return [_text(each, f"{key}[{at}]") for at, each in enumerate(cast("list[object]", value))]
    return fill(template, row, where, remedy)


def only_key(template: str) -> str | None:
    """Return the key of a template that is a single one, as it is written. None for others."""
    match parsed(template):
        case [("", str(key), "", None)]:
            return key
        case _:
            return None


@contextmanager
def fitting(template: str, row: Mapping[str, object], where: str, remedy: str = "") -> Generator[None]:
    """Raise DataError, which names `where`, if the block finds that a template does not fit a row."""
    try:
        yield
    except KeyError as error:
        key = str(error.args[0])
        hint = did_you_mean(key, row) or f"it has {', '.join(map(repr, row))}" + (remedy and f": {remedy}")
        raise DataError(f"{where}: the template {template!r} needs {key!r}, which the row lacks; {hint}") from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(
            f"{where}: the template {template!r} does not fit the row: {error}. "
            "Write {key} or {key[inner]}, and {{ and }} for braces"
        ) from error


def _filled(row: Mapping[str, object], text: str, key: str | None, form: str | None, conversion: str | None) -> str:
    """Return a text and the cell after it."""
    if key is None:
        return text
    value = row[key] if key.isidentifier() else _FORMATTER.get_field(key or "0", (), row)[0]
    if conversion:
        value = _FORMATTER.convert_field(value, conversion)
    own = _text(value, key) if value is None or not form else format(value, _FORMATTER.vformat(form, (), row))
    return text + own


def _text(value: object, key: str) -> str:
    """Return the text of a cell. TypeError for a table, and a list that is not of numbers."""
    if isinstance(value, Mapping | list | tuple) and not _is_numbers(value):
        is_table = isinstance(value, Mapping)
        kind, part = ("table", next(iter(cast("Mapping[str, object]", value)), "name")) if is_table else ("list", 0)
        raise TypeError(
            f"{key!r} is a {kind}, {shortened(value)}: take a part of it, such as {{{key}[{part}]}}, or write "
            f"{{{key}!s}} for all of it as Python writes it"
        )
    return str(_written(value))


def _is_numbers(value: object) -> bool:
    """True for lists of numbers, and lists of such lists."""
    return isinstance(value, list | tuple) and all(
        each is None or isinstance(each, int | float) or _is_numbers(each) for each in cast("Sequence[object]", value)
    )


def _written(value: object) -> object:
    """Return a value whose text is the cell's."""
    if value is None:
        return ""
    if isinstance(value, list):
        return [each if each is None else _written(each) for each in cast("list[object]", value)]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT else value


_Piece = tuple[str, str | None, str | None, str | None]


@cache
def parsed(template: str) -> Sequence[_Piece]:
    """Return the texts of a template, each with the key after it, and how that is formatted and converted."""
    return list(string.Formatter().parse(template))
