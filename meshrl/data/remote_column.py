"""Remote columns: which piece holds each row, and how fetched pieces become a column."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data import columns as kinds
from meshrl.data.columns import Column, ColumnType
from meshrl.data.images import Images
from meshrl.data.ragged import Dtype, Ragged, Source, join_sources, raw, sealed
from meshrl.errors import DataError
from meshrl.mesh import Array, Ref, Rows, empty, is_in_place, pool

_SHARED_FROM = 1 << 20
"""Size in bytes of the smallest array that is put together in shared memory."""


@dataclass(frozen=True, eq=False)
class RowIndex:
    """The place of each row of a column: its piece, and its number in that piece.

    Columns of a batch with the same layout of pieces share one object.
    """

    pieces: int
    piece: NDArray[np.int32]
    row: NDArray[np.int32]

    def take(self, rows: Rows | slice) -> tuple["RowIndex", Rows]:
        """Return the places of these rows, and the numbers of the pieces that are still needed, ascending."""
        piece, row = self.piece[rows], sealed(self.row[rows])
        if self.pieces == 1 and len(row):
            return RowIndex(1, sealed(piece), row), np.zeros(1, np.int64)
        kept, number = np.unique(piece, return_inverse=True)
        return RowIndex(len(kept), sealed(number.astype(np.int32)), row), kept.astype(np.int64)

    def __reduce__(self) -> tuple[Callable[..., "RowIndex"], tuple[object, ...]]:
        count = len(self.row)
        if self.pieces == 1 and np.array_equal(self.row, np.arange(count)):  # the usual reply: a number suffices
            return one_piece, (count,)
        return RowIndex, (self.pieces, self.piece, self.row)

    @staticmethod
    def concat(parts: Sequence["RowIndex"], numbers: Sequence[Sequence[int]]) -> "RowIndex":
        """Concatenate the rows of all parts. `numbers`: the new numbers of each part's pieces."""
        pairs = zip(parts, numbers, strict=True)
        piece = np.concatenate([np.asarray(new, np.int32)[part.piece] for part, new in pairs])
        row = np.concatenate([part.row for part in parts])
        return RowIndex(1 + max((max(new) for new in numbers if new), default=-1), sealed(piece), sealed(row))


def one_piece(rows: int) -> RowIndex:
    """Number the rows of one piece in their order."""
    return RowIndex(1, sealed(np.zeros(rows, np.int32)), sealed(np.arange(rows, dtype=np.int32)))


@dataclass(frozen=True)
class Piece:
    """A column in a group of columns that are held together."""

    held: Ref
    """The reference to a dict of columns."""
    name: str

    def of(self, values: Mapping[Ref, object]) -> Column:
        """Return its values from everything that was fetched."""
        column = cast("Mapping[str, Column]", values[self.held])[self.name]
        return sealed(column) if isinstance(column, np.ndarray) else column


class InlineRef(Ref):
    """A small column, which travels by value."""

    __slots__ = ("column",)

    def __init__(self, column: Column) -> None:
        self.column: Column = column

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """Return the columns."""
        return [{"": each.column} for each in cast("Sequence[InlineRef]", held)]


class RemoteColumn:
    """A column whose values stay where they were made, as one or more pieces. Immutable.

    Its rows can be selected and joined without the values. `arrived` returns the same column with the needed pieces,
    and only then can it be read. Pieces that differ here may be one where the column arrives, so they are not a set.
    """

    __slots__ = ("_column", "form", "offsets", "pieces", "places", "source", "values")

    def __init__(
        self,
        form: ColumnType,
        pieces: Sequence[Piece],
        places: RowIndex,
        offsets: Rows | None,
        source: Source | None = None,
        values: Sequence[Column | None] = (),
    ) -> None:
        """`offsets` and `source`: of a ragged column, if known. `values`: of each piece, None if not fetched."""
        self.form: ColumnType = form
        self.pieces: tuple[Piece, ...] = tuple(pieces)
        self.values: tuple[Column | None, ...] = tuple(values or [None] * len(pieces))
        self.places: RowIndex = places
        self.offsets: Rows | None = offsets
        self.source: Source | None = source
        self._column: Column | None = None

    def __len__(self) -> int:
        return len(self.places.row)

    def __reduce__(self) -> tuple[type["RemoteColumn"], tuple[object, ...]]:
        return RemoteColumn, (self.form, self.pieces, self.places, self.offsets, self.source)

    @property
    def lengths(self) -> Rows | None:
        """Number of tokens of each row of a ragged column. None for other columns."""
        return None if self.offsets is None else self.offsets[1:] - self.offsets[:-1]

    @property
    def is_here(self) -> bool:
        """True if the column can be read here."""
        return not self.missing

    @property
    def missing(self) -> list[Piece]:
        """The pieces that must be fetched before it can be read."""
        return [piece for piece, values in zip(self.pieces, self.values, strict=True) if values is None]

    def take(self, places: RowIndex, kept: Rows, offsets: Rows | None) -> "RemoteColumn":
        """Select rows, by the `places` and `kept` pieces that `RowIndex.take` returned."""
        pieces, values = [self.pieces[index] for index in kept], [self.values[index] for index in kept]
        return RemoteColumn(self.form, pieces, places, offsets, self.source, values)

    def arrived(self, fetched: Mapping[Ref, object]) -> "RemoteColumn":
        """Return the same column, readable, with fetched pieces."""
        pairs = zip(self.pieces, self.values, strict=True)
        return self._with([piece.of(fetched) if old is None else old for piece, old in pairs])

    def left(self) -> "RemoteColumn":
        """Return the same column without values, as it travels."""
        return self._with(())

    def copied(self) -> "RemoteColumn":
        """Copy the column for another reader. Python values are copied when it is read."""
        return self._with(self.values) if self.form.kind == "objects" else self

    def _with(self, values: Sequence[Column | None]) -> "RemoteColumn":
        return RemoteColumn(self.form, self.pieces, self.places, self.offsets, self.source, values)

    def column(self, name: str) -> Column:
        """Return the values, put together on first use. Raises DataError if they were not fetched."""
        if self._column is None:
            if not self.is_here:
                raise DataError(
                    f"column `{name}` ({self.form}, {len(self)} rows) lies on the ranks that made it: "
                    f"write `batch = await batch.load({name!r})` before reading it here"
                )
            column = self._assembled(cast("Sequence[Column]", self.values))
            if isinstance(column, Ragged) and column.source != self.source:
                # A piece knows only the source of its rows before they were joined.
                column = Ragged.make(column.values, column.offsets, self.source)
            self._column = column
        return self._column

    @property
    def is_in_place(self) -> bool:
        """True if it was put together in this process, in shared memory."""
        values = self._column.values if isinstance(self._column, Ragged) else self._column
        return isinstance(values, np.ndarray) and is_in_place(values)

    def _assembled(self, pieces: Sequence[Column]) -> Column:
        places = self.places
        if not pieces:
            return self.form.empty()
        if len(pieces) == 1 and (run := _run(places.row)) is not None:
            return kinds.private(kinds.view(pieces[0], run))
        if self.form.kind == "objects":
            values = cast("Sequence[tuple[object, ...]]", pieces)
            pairs = zip(places.piece.tolist(), places.row.tolist(), strict=True)
            if any(isinstance(each, Images) for each in values):
                return Images.joined(values, pairs)
            return kinds.private(tuple([values[piece][row] for piece, row in pairs]))
        if self.offsets is not None:
            return Ragged.make(_tokens(cast("Sequence[Ragged]", pieces), places, int(self.offsets[-1])), self.offsets)
        return _rows(cast("Sequence[Array]", pieces), places)

    @classmethod
    def concat(cls, name: str, parts: Sequence["RemoteColumn"], places: RowIndex, offsets: Rows | None) -> Self:
        """Concatenate the rows of all parts. `places`: from `RowIndex.concat`. DataError if the types differ."""
        forms = sorted({str(part.form) for part in parts})
        if len(forms) > 1:
            raise DataError(
                f"column `{name}` differs between parts: {', '.join(forms)}; each must return the same kind, dtype and "
                "trailing dims"
            )
        found: dict[Piece, Column | None] = {}
        for part in parts:
            for piece, values in zip(part.pieces, part.values, strict=True):
                if found.get(piece) is None:
                    found[piece] = values
        source = join_sources(name, [part.source for part in parts])
        return cls(parts[0].form, list(found), places, offsets, source, list(found.values()))


def source_of(column: "Column | RemoteColumn") -> Source | None:
    """Return the source of a column. None if unknown."""
    return column.source if isinstance(column, Ragged | RemoteColumn) else None


def is_ragged(column: "Column | RemoteColumn") -> bool:
    """True if a column has values by token."""
    return isinstance(column, Ragged) or (isinstance(column, RemoteColumn) and column.form.kind == "ragged")


def renumbered(parts: Sequence[RemoteColumn]) -> tuple[tuple[int, ...], ...]:
    """For each part, number its pieces among the distinct pieces of all parts."""
    known: dict[Piece, int] = {}
    return tuple(tuple(known.setdefault(piece, len(known)) for piece in part.pieces) for part in parts)


def as_remote(column: "Column | RemoteColumn") -> RemoteColumn:
    """Return a RemoteColumn as it is, and wrap any other column by value."""
    if isinstance(column, RemoteColumn):
        return column
    offsets = column.offsets if isinstance(column, Ragged) else None
    piece, form = Piece(InlineRef(column), ""), ColumnType.of(column)
    return RemoteColumn(form, [piece], one_piece(len(column)), offsets, source_of(column), [column])


def _run(rows: NDArray[np.int32]) -> slice | None:
    """Return adjacent ascending row numbers as a slice, or None."""
    start, end = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
    follows = end - start == len(rows) and bool((rows == np.arange(start, end)).all())
    return slice(start, end) if follows else None


def _rows(pieces: Sequence[Array], places: RowIndex) -> Array:
    if len(pieces) == 1:
        pool.gathered += len(places.row) * _width(pieces[0])
        return sealed(pieces[0][places.row])
    whole = _room((len(places.row), *pieces[0].shape[1:]), pieces[0].dtype)
    for number, piece in enumerate(pieces):
        mine = places.piece == number
        whole[mine] = piece[places.row[mine]]
    pool.gathered += 2 * whole.nbytes  # copied twice, through another array
    return sealed(whole)


def _room(shape: tuple[int, ...], dtype: Dtype) -> Array:
    """Allocate an array to fill, in shared memory if it is large enough, so that it is passed on without a copy."""
    return (empty if prod(shape) * dtype.itemsize >= _SHARED_FROM else np.empty)(shape, dtype)


def _width(values: Array) -> int:
    """Bytes of a row or token."""
    return values.itemsize * prod(values.shape[1:])


def _tokens(pieces: Sequence[Ragged], places: RowIndex, count: int) -> Array:
    """Copy tokens run by run: adjacent rows of a piece are copied together."""
    starts, ends = np.empty(len(places.row), np.int64), np.empty(len(places.row), np.int64)
    for number, piece in enumerate(pieces):
        mine = places.piece == number
        rows = places.row[mine]
        starts[mine], ends[mine] = piece.offsets[rows], piece.offsets[rows + 1]
    breaks = np.flatnonzero((starts[1:] != ends[:-1]) | (places.piece[1:] != places.piece[:-1])) + 1
    first = np.concatenate([[0], breaks])
    last = np.concatenate([breaks, [len(starts)]]) - 1
    values = pieces[0].values
    whole, width = _room((count, *values.shape[1:]), values.dtype), _width(values)
    runs = zip(
        places.piece[first].tolist(), (starts[first] * width).tolist(), (ends[last] * width).tolist(), strict=True
    )
    parts, target, at = [raw(piece.values) for piece in pieces], raw(whole), 0
    for piece, start, end in runs:  # numpy is slower for many runs
        target[at : at + end - start] = parts[piece][start:end]
        at += end - start
    pool.gathered += at
    return sealed(whole)
