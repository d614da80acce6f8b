"""Events of a call, as its caller and its ranks saw it."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from itertools import count
from types import TracebackType
from typing import Protocol, Self, cast

import numpy as np

from meshrl.events import Call, Sink, Span, clock
from meshrl.mesh.engine import Member
from meshrl.mesh.sharding import Rows
from meshrl.mesh.watch import Waiting

_numbers = count()


class Observation:
    """Emits a `Call` when the block ends, and a `Span` for each rank that says when it ran."""

    def __init__(
        self, to: Sink, mesh: str, actor: str, endpoint: str, members: Sequence[Member], arguments: Iterable[object]
    ) -> None:
        """`members`: the ranks that are called, in the order of the requests."""
        self._to = to
        self._mesh, self._actor, self._endpoint, self._members = mesh, actor, endpoint, members
        self._id = next(_numbers)
        batches = [batch for batch in map(_batch, arguments) if batch is not None]
        tokens = [int(batch.lengths.sum()) for batch in batches if _has_tokens(batch)]
        self._rows = sum(map(len, batches)) if batches else None
        self._tokens = sum(tokens) if tokens else None
        self._began = to.now()
        self._start = clock() - self._began
        self.waiting: Waiting = Waiting(f"{actor}.{endpoint}", members)

    def __call__(self, number: int, began: float, ended: float) -> None:
        """Record when a request ran on its rank, as the engine's `OnSpan`."""
        self.waiting.answered(number)
        span = Span(
            self._id,
            self._mesh,
            self._members[number].rank.index,
            self._actor,
            self._endpoint,
            began - self._start,
            ended - self._start,
        )
        self._to.emit(span)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = (
            None if kind is None or kind is GeneratorExit else kind.__name__
        )  # leaving a stream early is not a failure
        ended = clock() - self._start
        self._to.emit(Call(self._id, self._actor, self._endpoint, self._began, ended, self._rows, self._tokens, failed))


class _Batch(Sized, Protocol):
    """The part of `Batch` that is read here. `Batch` itself lies above this module."""

    @property
    def lengths(self) -> Rows: ...

    @property
    def stored(self) -> Mapping[str, object]: ...


def _batch(value: object) -> _Batch | None:
    """Return the value if it is a batch. Values without a length, such as handles, are not asked for attributes."""
    found: object = getattr(value, "stored", None) if isinstance(value, Sized) else None
    return cast("_Batch", value) if isinstance(found, Mapping) else None


def _has_tokens(batch: _Batch) -> bool:
    """True if any column holds tokens. Without one, `lengths` is 1 for each row."""
    return any(isinstance(getattr(column, "lengths", None), np.ndarray) for column in batch.stored.values())
