"""The three kinds of columns: what they hold, and how they are checked and joined."""

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeAlias, cast

import numpy as np

from meshrl.data.provenance import Source, joined
from meshrl.data.ragged import Ragged, equal, frozen, gather, sealed
from meshrl.errors import DataError
from meshrl.mesh import Array, Rows

Objects: TypeAlias = tuple[object, ...]
Column: TypeAlias = Array | Ragged | Objects
"""A row column `[rows, ...]`, a token column, or Python values (text, dicts), one for each row."""
ColumnLike: TypeAlias = Array | Ragged | Sequence[object]
"""Anything that becomes a column. A list becomes Python values."""

TOKEN_COLUMNS = {"tokens": "int32", "loss_mask": "bool", "sampler_logprobs": "float32", "versions": "int32"}
ROW_COLUMNS = {"rewards": "float32", "groups": "int64"}
SCALARS = frozenset({str, int, float, bool, bytes, type(None)})


def taken(name: str, column: ColumnLike) -> Column:
    """Freeze a column, and convert a standard one to its own dtype. DataError for other values or the wrong kind."""
    result: Column
    if isinstance(column, Ragged):
        result = column
    elif isinstance(column, np.ndarray):
        if column.ndim == 0:
            raise DataError(f"column `{name}` is one number, {column}: give an array with one value for each row")
        result = frozen(column, f"column `{name}`")
    elif isinstance(column, (list, tuple)):
        if np.ndarray in set(map(type, column)):
            raise DataError(
                f"column `{name}` is a {type(column).__name__} of arrays: pack rows of any lengths with "
                "Ragged.of(rows, dtype), or stack equal ones with np.stack"
            )
        result = tuple(column)
    else:
        raise DataError(
            f"column `{name}` is {type(column).__name__}: give a numpy array, a Ragged, or a list or tuple "
            "of Python values"
        )
    return _standard(name, result)


def _standard(name: str, column: Column) -> Column:
    """Convert a standard column to its kind and dtype."""
    dtype = TOKEN_COLUMNS.get(name) or ROW_COLUMNS.get(name)
    if dtype is None:
        return column
    ragged = name in TOKEN_COLUMNS
    if isinstance(column, tuple) or isinstance(column, Ragged) is not ragged:
        example = f"Ragged.of(rows, np.{dtype})" if ragged else f"np.array(values, np.{dtype})"
        raise DataError(f"the standard column `{name}` is {describe(column)}: give {example}")
    if column.dtype == dtype:
        return column
    if not np.can_cast(column.dtype, dtype, "same_kind"):
        raise DataError(
            f"the standard column `{name}` is {column.dtype} and must be {dtype}: convert it, or use another name"
        )
    if isinstance(column, Ragged):
        return Ragged.make(column.values.astype(dtype), column.offsets, column.source)
    return sealed(column.astype(dtype))


def aligned(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Share one array of offsets between columns with equal ones. Standard columns must be aligned."""
    bounds: list[Rows] = []
    result = dict(columns)
    for name, column in columns.items():
        if isinstance(column, Ragged):
            offsets = next((known for known in bounds if equal(known, column.offsets)), None)
            if offsets is None:
                bounds.append(column.offsets)
            elif offsets is not column.offsets:
                result[name] = Ragged.make(column.values, offsets, column.source)
    tokens = result.get("tokens")
    for name in TOKEN_COLUMNS:
        other = result.get(name)
        if isinstance(tokens, Ragged) and isinstance(other, Ragged) and other.offsets is not tokens.offsets:
            check_lengths(name, other.lengths, tokens.lengths)
    return result


def check_lengths(name: str, lengths: Rows, tokens: Rows) -> None:
    """Raise DataError if a token column's rows differ in length from `tokens`."""
    wrong = np.flatnonzero(lengths != tokens)
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"row {row} has {tokens[row]} tokens and {lengths[row]} in `{name}`: token columns must have one value for "
            "each token"
        )


def describe(column: Column) -> str:
    """Describe a column in a few words: kind, dtype and source."""
    if isinstance(column, tuple):
        kinds = sorted({type(value).__name__ for value in column})
        return "/".join(kinds) or "Python values"
    values = column.values if isinstance(column, Ragged) else column
    shape = "".join(f"[{size}]" for size in values.shape[1:])
    if not isinstance(column, Ragged):
        return f"{values.dtype}{shape}"
    return f"ragged {values.dtype}{shape}{by(column.source)}"


def by(source: Source | None) -> str:
    """The source of a column, as `describe` adds it after the dtype."""
    return f" by {source}" if source else ""


def view(column: Column, run: slice) -> Column:
    """Return a view of a run of rows, or the column itself if these are all its rows."""
    if run.start == 0 and run.stop == len(column):
        return column
    if isinstance(column, Ragged):
        index, offsets = gather(column.offsets, run)
        return Ragged.make(column.values[index], offsets, column.source)
    return column[run]


def same(left: Column, right: Column) -> bool:
    """True if two columns agree in kind, dtype and values. NaN equals NaN."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        return _alike(left, right)
    if isinstance(left, Ragged) or isinstance(right, Ragged):
        return isinstance(left, Ragged) and isinstance(right, Ragged) and left == right
    return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and equal(left, right)


def _alike(left: object, right: object) -> bool:
    """True if Python values are equal, or hold NaN in the same places."""
    if left == right:
        return True
    if isinstance(left, float) and isinstance(right, float):
        return math.isnan(left) and math.isnan(right)
    if isinstance(left, dict) and isinstance(right, dict):
        items = cast("dict[object, object]", left)
        others = cast("dict[object, object]", right)
        return items.keys() == others.keys() and all(_alike(item, others[key]) for key, item in items.items())
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and type(left) is type(right):
        pairs = zip(cast("Sequence[object]", left), cast("Sequence[object]", right), strict=False)
        return len(left) == len(right) and all(_alike(one, other) for one, other in pairs)
    return False


def concat(name: str, parts: Sequence[Column], offsets: Rows | None = None) -> Column:
    """Concatenate the rows of one or more columns with the same kind, dtype and trailing dims.

    `offsets`: those of the resulting token column, if another one of the same lengths is known.
    """
    if set(map(type, parts)) == {tuple}:
        return tuple(chain.from_iterable(cast("Sequence[Objects]", parts)))
    ragged = [part for part in parts if isinstance(part, Ragged)]
    values = [part.values for part in ragged] or [part for part in parts if isinstance(part, np.ndarray)]
    if len(values) != len(parts) or len({(value.dtype, value.shape[1:]) for value in values}) > 1:
        raise DataError(
            f"column `{name}` differs between parts: {', '.join(map(describe, parts))}; all parts must return the "
            "same kind, dtype and trailing dims"
        )
    if not ragged:
        return sealed(np.concatenate(values))
    if offsets is None:
        return Ragged.concat(ragged, name)
    return Ragged.make(np.concatenate(values), offsets, joined(name, [part.source for part in ragged]))


def private(column: Column) -> Column:
    """Copy the mutable Python values (dicts, lists) of a column. Arrays are frozen already."""
    if not isinstance(column, tuple) or SCALARS.issuperset(map(type, column)):
        return column
    if set(map(type, column)) == {dict}:
        tables = cast("tuple[dict[object, object], ...]", column)
        if SCALARS.issuperset(map(type, chain.from_iterable(map(dict.values, tables)))):
            return tuple(map(dict.copy, tables))
    return tuple([_private(value) for value in column])


def _private(value: object) -> object:
    if type(value) is dict:
        return {key: _private(item) for key, item in value.items()}
    if type(value) is list:
        return [_private(item) for item in value]
    return value if type(value) in SCALARS else copy.deepcopy(value)
