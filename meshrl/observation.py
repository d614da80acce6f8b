"""A call as events: what its caller saw, and what the ranks say of it."""

from collections.abc import Iterable, Sequence, Sized
from itertools import count
from types import TracebackType
from typing import Protocol, Self, cast

from meshrl.engine import Member
from meshrl.events import Call, Sink, Span, clock
from meshrl.sharding import Rows

_numbers = count()


class _Rows(Protocol):
    """A batch, as far as it is counted."""

    @property
    def lengths(self) -> Rows:
        """Tokens of each row."""
        ...


class Observation:
    """Emits a `Call` when the block ends, and a `Span` for each rank that says when it ran."""

    def __init__(
        self, to: Sink, mesh: str, actor: str, endpoint: str, members: Sequence[Member], arguments: Iterable[object]
    ) -> None:
        """`members`: the ranks that are asked, in the order of the requests."""
        self._to = to
        self._mesh, self._actor, self._endpoint, self._members = mesh, actor, endpoint, members
        self._id = next(_numbers)
        sized = (each for each in arguments if isinstance(each, Sized))  # not a handle, of which nothing may be asked
        lengths = [cast("_Rows", each).lengths for each in sized if hasattr(each, "lengths")]
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
