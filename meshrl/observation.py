"""A call as events: what its caller saw, and what the ranks say of it."""

from collections.abc import Iterable, Sequence, Sized
from itertools import count
from types import TracebackType
from typing import Self

import numpy as np

from meshrl.engine import Member
from meshrl.events import Call, Sink, Span, clock
from meshrl.sharding import Rows

_numbers = count()


class Observation:
    """Emits a `Call` when the block ends, and a `Span` for each rank that says when it ran."""

    def __init__(
        self, to: Sink, mesh: str, actor: str, endpoint: str, members: Sequence[Member], arguments: Iterable[object]
    ) -> None:
        """`members`: the ranks that are asked, in the order of the requests."""
        self._to = to
        self._mesh, self._actor, self._endpoint, self._members = mesh, actor, endpoint, members
        self._id = next(_numbers)
        lengths = [found for found in map(_lengths, arguments) if found is not None]
        self._rows = sum(map(len, lengths)) if lengths else None
        self._tokens = sum(int(each.sum()) for each in lengths) if lengths else None
        self._began = to.now()
        self._start = clock() - self._began

    def __call__(self, number: int, began: float, ended: float) -> None:
        """As the engine's `Seen`."""
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
        )  # a stream that is left has not failed
        ended = clock() - self._start
        self._to.emit(Call(self._id, self._actor, self._endpoint, self._began, ended, self._rows, self._tokens, failed))


def _lengths(value: object) -> Rows | None:
    """Tokens of each row, of a batch. What has no length, such as a handle, is not asked for attributes."""
    found: object = getattr(value, "lengths", None) if isinstance(value, Sized) else None
    return found if isinstance(found, np.ndarray) else None
