"""Tables of columns, local or remote: the operations on all columns of a batch."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike

from meshrl.data import columns as kinds
from meshrl.data.columns import TOKEN_COLUMNS, Column, ColumnType
from meshrl.data.images import Images
from meshrl.data.ragged import Ragged, bounds_of, equal, gather, sealed
from meshrl.data.remote_column import Piece, RemoteColumn, RowIndex, as_remote, one_piece, renumbered, source_of
from meshrl.errors import DataError, DataLost
from meshrl.mesh import Put, Rows, fetch

Stored: TypeAlias = Column | RemoteColumn
"""A column as a batch keeps it."""
Table: TypeAlias = Mapping[str, Stored]


def aligned(table: Table) -> dict[str, Stored]:
    """Return the columns. Ragged ones with equal offsets share them. DataError if standard ones are not aligned."""
    known: list[Rows] = []
    result = dict(table)
    for name, column in table.items():
        if isinstance(column, Ragged):
            offsets = next((each for each in known if equal(each, column.offsets)), None)
            if offsets is None:
                known.append(column.offsets)
            elif offsets is not column.offsets:
                result[name] = Ragged.make(column.values, offsets, column.source)
    tokens = result.get("tokens")
    for name in TOKEN_COLUMNS:
        other = result.get(name)
        if isinstance(tokens, Ragged | RemoteColumn) and isinstance(other, Ragged | RemoteColumn):
            wanted, given = tokens.offsets, other.offsets
            if wanted is not None and given is not None and given is not wanted:
                kinds.check_lengths(name, given[1:] - given[:-1], wanted[1:] - wanted[:-1])
    return result


def lengths(column: Stored | None) -> Rows | None:
    """Number of tokens of each row of a ragged column. None for other columns."""
    return column.lengths if isinstance(column, Ragged | RemoteColumn) else None


def take(table: Table, rows: Rows | slice) -> dict[str, Stored]:
    """Select these rows of each column, as views for a slice. What columns share is computed once."""
    spans: dict[int, tuple[Rows | slice, Rows]] = {}
    places: dict[int, tuple[RowIndex, Rows]] = {}
    bounds: dict[int, Rows | None] = {id(None): None}
    taken: dict[str, Stored] = {}
    for name, column in table.items():
        if isinstance(column, Images):
            taken[name] = column.take(rows)
        elif isinstance(column, tuple):
            taken[name] = column[rows] if isinstance(rows, slice) else tuple([column[row] for row in rows.tolist()])
        elif isinstance(column, Ragged):
            key = id(column.offsets)
            spans[key] = spans.get(key) or gather(column.offsets, rows)
            index, offsets = spans[key]
            taken[name] = Ragged.make(column.values[index], offsets, column.source)
        elif isinstance(column, RemoteColumn):
            key = id(column.places)
            places[key] = places.get(key) or column.places.take(rows)
            size = id(column.offsets)
            if size not in bounds and column.lengths is not None:
                bounds[size] = sealed(bounds_of(column.lengths[rows]))
            taken[name] = column.take(*places[key], bounds[size])
        else:
            taken[name] = sealed(column[rows])
    return taken


def concat(tables: Sequence[Table]) -> dict[str, Stored]:
    """Concatenate the rows of one or more tables with the same columns.

    What the columns of each table share (offsets, places) they share in the result.
    """
    offsets: dict[tuple[int, ...], Rows] = {}
    places: dict[object, RowIndex] = {}
    bounds: dict[tuple[int, ...], Rows | None] = {}
    alive: list[RemoteColumn] = []
    joined: dict[str, Stored] = {}
    for name in tables[0]:
        parts = [table[name] for table in tables]
        if not any(isinstance(part, RemoteColumn) for part in parts):
            shared = tuple([id(part.offsets) for part in parts if isinstance(part, Ragged)])
            column = kinds.concat(name, cast("list[Column]", parts), offsets.get(shared))
            if isinstance(column, Ragged):
                offsets[shared] = column.offsets
            joined[name] = column
            continue
        remotes = [as_remote(part) for part in parts]
        alive += remotes  # keeps each `id` unique
        numbers = renumbered(remotes)
        key = tuple(id(part.places) for part in remotes), numbers
        places[key] = places.get(key) or RowIndex.concat([part.places for part in remotes], numbers)
        key_of_bounds = tuple(id(part.offsets) for part in remotes)
        if key_of_bounds not in bounds:
            sizes = [part.lengths for part in remotes if part.lengths is not None]
            known = len(sizes) == len(remotes)
            bounds[key_of_bounds] = sealed(bounds_of(np.concatenate(sizes))) if known else None
        joined[name] = RemoteColumn.concat(name, remotes, places[key], bounds[key_of_bounds])
    return joined


def hold(table: Table, rows: int, put: Put, limit: int, shares: bool) -> dict[str, Stored]:
    """Return the columns that travel as references: those of more than `limit` bytes, and fetched ones as they came.

    Columns that were joined here, in memory that all readers share (`shares`), are passed on from here. Token columns
    with the same offsets become one object, because a reader that needs one usually needs all of them.
    """
    held: dict[str, Stored] = {}
    together: dict[int, dict[str, Column]] = {}
    for name, stored in table.items():
        if isinstance(stored, RemoteColumn) and not (shares and stored.is_in_place):
            held[name] = stored.left()
        elif _is_larger(column := read(name, stored), limit):
            key = id(column.offsets if isinstance(column, Ragged) else column)
            together.setdefault(key, {})[name] = column
    if not together:
        return held
    places = one_piece(rows)
    for columns in together.values():
        ref = put(columns)
        for name, column in columns.items():
            bounds = column.offsets if isinstance(column, Ragged) else None
            held[name] = RemoteColumn(ColumnType.of(column), [Piece(ref, name)], places, bounds, source_of(column))
    return held


async def load(table: Table, names: Iterable[str]) -> dict[str, Stored]:
    """Make these remote columns of a table readable. Each piece is fetched once. Raises `DataLost` if one is lost."""
    wanted = {name: column for name in names if isinstance(column := table[name], RemoteColumn)}
    try:
        values = await fetch(piece.held for column in wanted.values() for piece in column.missing)
    except DataLost as lost:
        missing = [f"`{name}`" for name, column in wanted.items() if column.missing]
        what = f"the column{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise DataLost(lost.where, lost.reason, what) from None
    return {**table, **{name: column.arrived(values) for name, column in wanted.items()}}


def read(name: str, column: Stored) -> Column:
    """Return the values of a column. DataError if they are remote."""
    return column.column(name) if isinstance(column, RemoteColumn) else column


def describe(column: Stored) -> str:
    """Describe a column in a few words: kind, dtype, source, and whether it is remote."""
    if isinstance(column, RemoteColumn):
        return f"{column.form}{kinds.by(column.source)}" + ("" if column.is_here else " elsewhere")
    return kinds.describe(column)


def row_numbers(rows: ArrayLike, count: int) -> Rows:
    """Return the row numbers from 0, `int64`, of a selection from `count` rows, never in the caller's own array."""
    given = np.asarray(rows)
    if given.ndim != 1 or (given.dtype.kind not in "iub" and given.size):
        raise DataError(
            f"rows are selected by {given.dtype}{list(given.shape)}: give row numbers or a bool for each "
            "row, in one dim"
        )
    if given.dtype == bool:
        if len(given) != count:
            raise DataError(f"a mask of {len(given)} bools for a batch of {count} rows: give one for each row")
        return np.flatnonzero(given)
    if not given.size:
        return np.empty(0, np.int64)
    numbers = given.astype(np.int64)
    if np.maximum.reduce(numbers.view(np.uint64)) < count:  # one comparison covers negative ones too
        return numbers
    wrong = given[(given < -count) | (given >= count)]
    if len(wrong):
        raise DataError(f"there is no row {wrong[0]} in {count} rows (0 to {count - 1}, or from -1 down)")
    return np.where(given < 0, given + count, given).astype(np.int64)


def _is_larger(column: Column, limit: int) -> bool:
    """True if a column has more than `limit` bytes. Python values count by the approximate size of their text."""
    if not isinstance(column, tuple) or isinstance(column, Images):
        return column.nbytes > limit
    total = 0
    level: Sequence[object] = column
    while level:  # level by level, until the limit is passed
        kinds_of = set(map(type, level))
        texts = level if kinds_of == {str} else [value for value in level if type(value) is str or type(value) is bytes]
        total += sum(map(len, cast("Sequence[str | bytes]", texts))) + 8 * (len(level) - len(texts))
        if total > limit or kinds_of <= kinds.SCALARS:
            break
        if kinds_of == {dict}:
            level = list(chain.from_iterable(map(dict.values, cast("Sequence[dict[object, object]]", level))))
        else:
            level = list(chain.from_iterable(map(_inside, level)))
    return total > limit


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict | Mapping):  # dict first, because it is quick
        return cast("Mapping[object, object]", value).values()
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()
