"""Batches: named columns of rows without padding, which are split over ranks by tokens and joined in order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copyreg import __newobj__  # type: ignore[attr-defined]  # pickle knows it by an opcode
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import ClassVar, Self, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Buffer

from meshrl.data import columns as kinds
from meshrl.data import table
from meshrl.data.columns import Column, ColumnLike, pack, unpack, unpack_own
from meshrl.data.ragged import Ragged, Source, portable, raw, sealed
from meshrl.data.remote_column import RemoteColumn, source_of
from meshrl.errors import DataError, did_you_mean
from meshrl.mesh import Array, HasRefs, Put, Rows, even_plan

__all__ = ["Batch", "Column", "Ragged"]


K = TypeVar("K")

_TURNS = 1 << 20
"""Most times that `repeat` can repeat a row, so that the row numbers stay distinct."""

_State: TypeAlias = tuple[bytes, Sequence[Buffer], Mapping[str, RemoteColumn], tuple[str, ...]]
"""A pickled batch: local columns in the wire format, remote columns, and all names in order."""


class Batch(HasRefs):
    """Rows of named columns. Immutable: each change returns a new batch, which shares the unchanged columns.

    Standard row columns: `prompt`, `answer` and `completion` (text), `row` (the task's dict), `groups` int64 (the
    number of the prompt), `temperature` and `rewards` float32, `advantages` float32 (by row or by token),
    `truncated` bool, and `reward_error` (text or None). Standard token columns, with the same lengths in each row:
    `tokens` int32 (prompt and completion), `loss_mask` bool (True for learned tokens), `sampler_logprobs` float32,
    and `versions` int32 (the policy version that sampled the token, -1 in a prompt). A sampler adds
    `oldest_version` int32, the oldest of the completion, and a stream `staleness` int32, how many publications that
    is behind. `logprobs` and `reference_logprobs`, float32 by token, come from the trainer and the reference.
    `source` says what computed such a column, also after rows moved. `images` (`Images`) names the images of each row's
    texts and holds each file once, and `image_fingerprints` are of what a sampler made of them.

        batch = Batch.of(tokens=Ragged.of([[1, 2], [3]], np.int32), rewards=np.zeros(2, np.float32))

    Each `part` keeps the row numbers that it was taken at, and `select`, `repeat`, `assign`, `only` and `drop` carry
    them along. So `join` restores the order, however a rank has reordered, filtered or repeated its rows.
    """

    __slots__ = ("_columns", "_origins", "_rows")

    def __init__(self, columns: Mapping[str, ColumnLike]) -> None:
        """Make a batch. Arrays are frozen, lists become Python values. DataError if the numbers of rows differ."""
        taken = {name: kinds.taken(name, column) for name, column in columns.items()}
        rows = {name: len(column) for name, column in taken.items()}
        if len(set(rows.values())) > 1:
            raise DataError(
                "the columns of a batch differ in rows: "
                + ", ".join(f"`{name}` has {count}" for name, count in rows.items())
            )
        self._rows = next(iter(rows.values()), 0)
        self._columns: table.Table = table.aligned(taken)
        self._origins: tuple[Rows, ...] = ()

    @classmethod
    def of(cls, **columns: ColumnLike) -> Self:
        """Make a batch of columns, given by keyword."""
        return cls(columns)

    @classmethod
    def _make(cls, rows: int, columns: table.Table, origins: Iterable[Rows]) -> Self:
        """Make a batch of columns that are known to fit, in a mapping that nobody writes to any more."""
        self = cls.__new__(cls)
        self._rows = rows
        self._columns = columns
        self._origins = tuple(map(sealed, origins))
        return self

    @property
    def columns(self) -> Mapping[str, Column]:
        """All columns by name. Raises DataError if one is remote: `load` it first."""
        return MappingProxyType({name: table.read(name, column) for name, column in self._columns.items()})

    @property
    def stored(self) -> table.Table:
        """All columns by name, remote ones included."""
        return MappingProxyType(self._columns)

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """The names of remote columns, which cannot be read before they are loaded."""
        return tuple([n for n, column in self._columns.items() if type(column) is RemoteColumn and not column.is_here])

    @property
    def origins(self) -> tuple[Rows, ...]:
        """The row numbers in each batch that this one was taken from by `part`, outermost first: `int64[rows]` each."""
        return self._origins

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> Column:
        return table.read(name, self._stored(name))

    def _stored(self, name: str) -> table.Stored:
        if name not in self._columns:
            hint = did_you_mean(name, self._columns, "`{}`")
            has = f"it has {', '.join(self.names) or 'none'}"
            raise DataError(f"the batch has no column `{name}`: {f'{hint} {has}' if hint else has}")
        return self._columns[name]

    def source(self, name: str) -> Source | None:
        """Return what computed a token column, even before it is loaded. None if unknown, or for other columns."""
        return source_of(self._stored(name))

    def row(self, name: str) -> Array:
        """Return a row column, `[rows, ...]`. Raises DataError if the column is of another kind."""
        return self._of_kind(name, np.ndarray, "a row column")

    def ragged(self, name: str) -> Ragged:
        """Return a token column. Raises DataError if the column is of another kind."""
        return self._of_kind(name, Ragged, "a token column")

    def objects(self, name: str) -> tuple[object, ...]:
        """Return a column of Python values, one for each row. Raises DataError if the column is of another kind."""
        return self._of_kind(name, tuple, "Python values")

    def place(self, row: int) -> str:
        """Name a row in an error: by its `place`, where its task's source has it, or else by its number here."""
        here = "place" in self and "place" not in self.elsewhere
        return str(self.objects("place")[row]) if here else f"row {row}"

    def _of_kind(self, name: str, kind: type[K], wanted: str) -> K:
        column = self[name]
        if not isinstance(column, kind):
            accessor = "objects" if isinstance(column, tuple) else "ragged" if isinstance(column, Ragged) else "row"
            raise DataError(
                f"column `{name}` is {kinds.describe(column)}, not {wanted}: read it with batch.{accessor}({name!r})"
            )
        return column

    @property
    def tokens(self) -> Ragged:
        """Tokens of prompt and completion, int32."""
        return self.ragged("tokens")

    @property
    def loss_mask(self) -> Ragged:
        """True for learned tokens, bool."""
        return self.ragged("loss_mask")

    @property
    def sampler_logprobs(self) -> Ragged:
        """The sampler's log-probability of each token, float32, 0 in a prompt."""
        return self.ragged("sampler_logprobs")

    @property
    def versions(self) -> Ragged:
        """The policy version that sampled each token, int32, -1 in a prompt."""
        return self.ragged("versions")

    @property
    def rewards(self) -> NDArray[np.float32]:
        """The reward of each row, `float32[rows]`."""
        return cast("NDArray[np.float32]", self.row("rewards"))

    @property
    def groups(self) -> Rows:
        """The number of each row's prompt, `int64[rows]`."""
        return cast("Rows", self.row("groups"))

    @property
    def lengths(self) -> Rows:
        """Number of tokens of each row, `int64[rows]`: of `tokens`, else of the longest token column, else 1."""
        tokens = table.lengths(self._columns.get("tokens"))
        if tokens is not None:
            return tokens
        ragged = [each for each in map(table.lengths, self._columns.values()) if each is not None]
        return max(ragged, key=np.sum, default=np.ones(self._rows, np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the local arrays. Python values are not counted."""
        return sum(column.nbytes for column in self._columns.values() if isinstance(column, Ragged | np.ndarray))

    def assign(self, **columns: ColumnLike) -> Self:
        """Add or replace columns. Raises DataError if a column has another number of rows than the batch."""
        taken = {name: kinds.taken(name, column) for name, column in columns.items()}
        for name, column in taken.items():
            if len(column) != self._rows:
                raise DataError(
                    f"column `{name}` has {len(column)} rows and the batch has {self._rows}: give a value for each row"
                )
        whole: table.Table = {**self._columns, **taken}
        if any(isinstance(column, Ragged) for column in taken.values()):
            whole = table.aligned(whole)
        return self._make(self._rows, whole, self._origins)

    def only(self, *names: str) -> Self:
        """Keep only these columns."""
        return self._make(self._rows, {name: self._stored(name) for name in names}, self._origins)

    def drop(self, *names: str) -> Self:
        """Remove these columns."""
        dropped = self.only(*names)
        rest = {name: column for name, column in self._columns.items() if name not in dropped}
        return self._make(self._rows, rest, self._origins)

    def select(self, rows: ArrayLike) -> Self:
        """Select rows, in the given order. `rows`: int[any] (negative: from the end), or bool[rows]."""
        return self._take(table.row_numbers(rows, self._rows))

    def repeat(self, n: int) -> Self:
        """Repeat each row n times, next to each other. DataError if n is negative, or if calls repeat too often."""
        if not 0 <= n <= _TURNS:
            raise DataError(f"rows cannot be repeated {n} times: give a number from 0 to {_TURNS}")
        if any(level.max(initial=0) >= (1 << 63) // _TURNS for level in self._origins):
            raise DataError("rows of a part were repeated too often by nested calls of repeat: join the part first")
        repeated = self._take(np.repeat(np.arange(self._rows), n))
        turn = np.tile(np.arange(n), self._rows)
        # The factor does not depend on n, so that parts which were repeated differently sort as one batch.
        return self._make(len(repeated), dict(repeated.stored), [level * _TURNS + turn for level in repeated.origins])

    def _take(self, rows: Rows) -> Self:
        """Select rows whose numbers are in range."""
        if len(rows) == self._rows and bool((rows == np.arange(self._rows)).all()):
            return self
        return self._make(len(rows), table.take(self._columns, rows), [level[rows] for level in self._origins])

    async def load(self, *names: str) -> Self:
        """Fetch these columns, or all columns if none is named, and return the batch with them.

        Large columns that a mesh returns stay on its ranks. Loading fetches the pieces with the rows of this batch. A
        batch that is passed on to a mesh need not be loaded.
        """
        for name in names:
            self._stored(name)
        wanted = set(names or self.names).intersection(self.elsewhere)
        if not wanted:
            return self
        return self._make(self._rows, await table.load(self._columns, wanted), self._origins)

    def hold(self, put: Put, limit: int, shares: bool = False) -> Self:
        """Move each column with more than `limit` bytes elsewhere by `put`, and return the batch."""
        held = table.hold(self._columns, self._rows, put, limit, shares)
        return self._make(self._rows, {**self._columns, **held}, self._origins) if held else self

    def plan(self, parts: int) -> list[Rows]:
        """Return the row numbers of parts that are balanced by tokens. DataError for fewer than one part.

        Parts are runs of adjacent rows, which need no copy, if these are balanced within 1/256. Otherwise each row goes
        to the lightest part, longest row first (Graham 1969, LPT). Two parts differ by at most the tokens of one row.
        """
        if parts < 1:
            raise DataError(f"a batch cannot be split into {parts} parts: give a number from 1")
        if parts == 1:
            return [np.arange(self._rows)]
        return even_plan(self.lengths, parts)

    def part(self, rows: Rows) -> Self:
        """Select rows that keep their row numbers, for `join`."""
        numbers = table.row_numbers(rows, self._rows)
        taken = self._take(numbers)
        return self._make(len(numbers), dict(taken.stored), (*taken.origins, numbers))

    def parts(self, plan: Sequence[Rows]) -> list[Self]:
        """Return the parts of a plan, like `part` for each. All rows are copied once, and the parts are views."""
        whole = self.part(np.concatenate(plan))
        if len(plan) == 1:
            return [whole]
        columns, origins = whole.stored, whole.origins
        runs = [slice(start, end) for start, end in pairwise(accumulate(map(len, plan), initial=0))]
        return [
            self._make(run.stop - run.start, table.take(columns, run), [level[run] for level in origins])
            for run in runs
        ]

    def split(self, n: int) -> list[Self]:
        """Split into n parts that are balanced by tokens. Some are empty if there are fewer rows."""
        return self.parts(self.plan(n))

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the rows of all parts. Parts without rows are skipped. DataError if the columns differ."""
        filled = [part for part in parts if len(part)]
        if not filled:
            depth = max((len(part.origins) for part in parts), default=0)
            widest = max((part.stored for part in parts), key=len, default={})
            return cls._make(0, dict(widest), [np.empty(0, np.int64)] * depth)
        if len(filled) == 1:
            return filled[0]
        first = filled[0]
        for index, part in enumerate(filled):
            if part.stored.keys() != first.stored.keys():
                raise DataError(
                    f"parts differ in columns: part 0 has {', '.join(first.names)}, part {index} has "
                    f"{', '.join(part.names)}: return the same columns from each"
                )
            if len(part.origins) != len(first.origins):
                raise DataError(
                    f"parts differ in origin: part 0 was split {len(first.origins)} times, part {index} "
                    f"{len(part.origins)} times: make either all of them from the argument (by assign, select or "
                    "repeat), or none"
                )
        levels = [np.concatenate(level) for level in zip(*(p.origins for p in filled), strict=True)]
        return cls._make(sum(map(len, filled)), table.concat([part.stored for part in filled]), levels)

    @classmethod
    def join(cls, parts: Sequence[Self], plan: Sequence[Rows] | None = None) -> Self:
        """Join the rows of all parts, in the order of the batch that they were split from.

        Parts that were made by `part` know their row numbers. Newly made parts must have one row for each row of
        `plan`, in its order: DataError if they do not. Without a plan, or with an empty one (no batch was split), they
        are concatenated. Parts without rows are skipped.
        """
        whole = cls.concat(parts)
        if plan is not None and not plan:
            return whole
        if whole.origins:
            *outer, origin = whole.origins
            return cls._make(len(whole), dict(whole.stored), outer).select(origin.argsort(kind="stable"))
        if plan is None:
            return whole
        wanted, given = [len(rows) for rows in plan], [len(part) for part in parts]
        if wanted != given:
            raise DataError(
                f"the parts of a join have {given} rows for {wanted} rows of the argument, and do not know "
                "their row numbers: make the result from the argument, with assign, select or repeat"
            )
        return whole.select(np.concatenate(plan).argsort(kind="stable"))

    def to_wire(self) -> tuple[bytes, list[memoryview]]:
        """Return a msgpack header and the raw bytes of the arrays, not copied. Tuples in Python values become lists."""
        header, parts = pack(self._rows, self.columns, self._origins)
        return header, [memoryview(part) if isinstance(part, bytes) else raw(part) for part in parts]

    @classmethod
    def from_wire(cls, header: Buffer, buffers: Sequence[Buffer]) -> Self:
        """Make the batch from the result of `to_wire`. It uses the buffers, which must not be written afterwards."""
        return cls._make(*unpack(header, buffers))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., Self], tuple[type[Self]], _State]:
        remote = {name: column for name, column in self._columns.items() if isinstance(column, RemoteColumn)}
        here = {name: column for name, column in self._columns.items() if not isinstance(column, RemoteColumn)}
        header, parts = pack(self._rows, here, self._origins)
        buffers = [part if isinstance(part, bytes) else portable(part, protocol) for part in parts]
        return __newobj__, (type(self),), (header, buffers, remote, self.names)

    def __setstate__(self, state: _State) -> None:
        header, buffers, remote, names = state
        self._rows, here, self._origins = unpack_own(header, buffers)
        stored: table.Table = {**here, **remote}
        self._columns = {name: stored[name] for name in names} if remote else here

    def __eq__(self, other: object) -> bool:
        """True if names, kinds, dtypes and values agree. NaN equals NaN. The order of columns does not matter."""
        if not isinstance(other, Batch):
            return NotImplemented
        return (
            self._rows == len(other)
            and self._columns.keys() == other.columns.keys()
            and all(kinds.same(self[name], other[name]) for name in self._columns)
        )

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> Self:
        columns: table.Table = {
            name: column.copied() if isinstance(column, RemoteColumn) else kinds.private(column)
            for name, column in self._columns.items()
        }
        if all(columns[name] is column for name, column in self._columns.items()):
            return self
        return self._make(self._rows, columns, self._origins)

    def __repr__(self) -> str:
        ragged = any(table.lengths(column) is not None for column in self._columns.values())
        size = f"{self._rows} rows" + (f", {self.lengths.sum()} tokens" if ragged else "")
        columns = ", ".join(f"{name} {table.describe(column)}" for name, column in self._columns.items())
        return f"Batch({size}: {columns or 'no columns'})"
