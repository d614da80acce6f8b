"""The replicas of a sampler: which are available, how a dead one returns with the newest weights, and poison rows."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeAlias, TypeVar

import numpy as np

from meshrl import log
from meshrl.data import Batch, Weights
from meshrl.errors import (
    ConfigError,
    DataError,
    EngineDied,
    MeshStopped,
    NoRoom,
    OtherVersions,
    RankDied,
    RankFailed,
    described,
    is_lost,
    shortened,
)
from meshrl.events import gauge
from meshrl.mesh import Rows, is_away, leave_out, min_ranks, replicas, respawn, take_in
from meshrl.overlap.replay import Loaded, measured, newest, renewed
from meshrl.overlap.stream_state import StreamState
from meshrl.roles import Sampler

T = TypeVar("T")

Incarnation: TypeAlias = tuple[int, int]
"""A replica's number, and how often it has failed before."""

_LONGEST_PAUSE: Final = 60.0
"""Most seconds between two attempts to restart a replica that keeps dying."""
_FATAL: Final = 5
"""Successive deaths, each of a replica that sampled the same row, that are not an accident."""
_NAMED: Final = 3
"""Number of groups that an error names."""


class Replicas:
    """The replicas of a sampler: its ranks if they are independent, else the sampler as a whole.

    All calls leave out a replica that dies. It is restarted while the others continue, and gets the newest weights
    before any rows. A death uses one of the stream's `retries`, except on a mesh with `min_ranks`.
    """

    def __init__(
        self, state: StreamState, changed: Callable[[str, tuple[Incarnation, Exception] | None], None]
    ) -> None:
        """`changed` gets a description, and the incarnation that ended with its error."""
        self.each: list[Sampler] = replicas(state.sampler)
        self._state = state
        self._min_ranks = min_ranks(state.sampler)
        self._retries = state.retries
        self._changed = changed
        self._failures = [0] * len(self.each)
        """Number of ended incarnations of each replica."""
        self._away: dict[int, Exception | None] = {}
        """Unavailable replicas, with the error that ended them. None if they were never available."""
        self._idle = [0] * len(self.each)
        """Number of successive incarnations of each replica that ended without a row."""
        self._weights: Loaded = {}
        """The newest weights, which a restarted replica gets."""
        self._changing = asyncio.Lock()
        """Held while weights are loaded, or a replica is taken in."""
        self._restarts = False
        """True from the first sampling to the end of the stream, which cancels restarts that are under way."""

    def begin(self) -> None:
        """Restart those that died before, and wait for those that are not available yet."""
        self._weights = newest.get(self._state.sampler, self._weights)  # those published so far
        self._restarts = True
        for number, replica in enumerate(self.each):
            if is_away(replica):
                self._away.setdefault(number, None)
                self._state.start(self._restart(number))
            else:  # a call outside the stream may have brought it back
                self._away.pop(number, None)

    def end(self) -> None:
        """Store the weights for the next restart of an absent replica, because no stream manages the replicas now."""
        self._restarts = False
        if self._away and self._weights:
            newest[self._state.sampler] = self._weights

    @property
    def available(self) -> Rows:
        """The numbers of available replicas, int64."""
        return np.array([number for number in range(len(self.each)) if number not in self._away], np.int64)

    @property
    def are_enough(self) -> bool:
        """True if enough replicas are available to sample rows."""
        return len(self.each) - len(self._away) >= max(1, self._min_ranks)

    def why_not(self) -> str:
        """Describe the missing replicas."""
        missing = "; ".join(f"replica {number}: {error or 'not there yet'}" for number, error in self._away.items())
        count, wanted = len(self.each), max(1, self._min_ranks)
        return f"{count - len(self._away)} of {count} replicas of the sampler are there, and {wanted} wanted: {missing}"

    def incarnation(self, number: int) -> Incarnation:
        """Return the present incarnation of a replica."""
        return number, self._failures[number]

    def is_over(self, incarnation: Incarnation) -> bool:
        """True if the end of this incarnation has been handled."""
        number, failures = incarnation
        return self._failures[number] > failures

    def delivered(self, number: int) -> None:
        """Note that rows arrived from a replica."""
        self._idle[number] = 0

    async def load(self, weights: Weights) -> Batch | None:
        """Load weights into all available replicas, and later into each new one. Returns the results, if any."""
        async with self._changing:
            self._weights = renewed(self._weights, weights)
            given = weights.read_by(len(self.available))
            places = await self._on_each(lambda replica: replica.load(given))
            return Batch.concat(places) if places else None

    async def abort(self) -> None:
        """Abort the running calls."""
        async with self._changing:
            await self._on_each(lambda replica: replica.abort())

    def failed(self, incarnation: Incarnation, error: Exception) -> None:
        """Handle the failure of a call. Raises the error if it cannot be survived."""
        number, _ = incarnation
        if self.is_over(incarnation):
            return
        self._accept_loss(number, error)
        self._failures[number] += 1
        if died(error):
            leave_out(self.each[number])
            if not is_away(self.each[number]):
                raise error  # it is on no mesh, so nobody can restart it
            self._away[number] = error
            if self._restarts:
                self._state.start(self._restart(number))
            self._gauge()
        dead = (incarnation, error) if died(error) else None
        self._changed(f"rows were lost with replica {number} of its sampler and drawn again", dead)
        self._state.condition.notify_all()

    def _accept_loss(self, number: int, error: Exception) -> None:
        """Count the error, or raise it if its loss cannot be repeated."""
        alone = len(self._away.keys() | {number}) == len(self.each)
        unknown = not self._weights and alone  # no replica has its weights
        if self._min_ranks and not unknown and (died(error) or number in self._away):
            log.warning("a replica of the sampler is away, and its rows are sampled again elsewhere", error=str(error))
            return
        if died(error) and unknown:
            raise error
        self._retry(error)

    def unread(self, error: Exception) -> None:
        """Handle rows that cannot be fetched. Raises the error if that cannot be survived."""
        if self._min_ranks:
            log.warning("rows are out of reach, and are sampled again", error=str(error))
        else:
            self._retry(error)

    def _retry(self, error: Exception) -> None:
        if not self._retries:
            raise error
        self._retries -= 1
        log.warning("rollouts were lost and are sampled again", retries_left=self._retries, error=str(error))

    async def _restart(self, number: int) -> None:
        """Restart a replica, however long that takes, and take it in."""
        lost: Weights | None = None
        while True:
            if self._idle[number] > 1:
                await asyncio.sleep(min(_LONGEST_PAUSE, 2.0 ** (self._idle[number] - 2)))
            self._idle[number] += 1
            given = lost
            try:
                await respawn(self.each[number])
                await self._state.condition.wait_quietly_for(partial(self._has_other_weights, lost))
                async with self._changing:
                    for given in self._weights.values():
                        await measured(await self.each[number].load(given))  # no schedule replays this
                    self._take_in(number)
                return
            except (RankDied, RankFailed, ConfigError) as failure:
                if is_lost(failure) and given is not None and not given.lasts:
                    lost = given  # the policy has moved on, and newer weights will come
                    continue
                waits = self.are_enough or isinstance(failure, NoRoom | OtherVersions)  # another machine may come
                if not died(failure) and not (self._min_ranks and waits):
                    raise
                self._accept_loss(number, failure)
                self._failures[number] += 1
                self._away[number] = failure

    def _has_other_weights(self, lost: Weights | None) -> bool:
        """True if there are weights, and none of them are these."""
        return bool(self._weights) and all(weights is not lost for weights in self._weights.values())

    def _take_in(self, number: int) -> None:
        del self._away[number]
        take_in(self.each[number])
        self._changed(f"replica {number} of its sampler came while it ran", None)
        log.info("a replica of the sampler is available", replica=number, of=len(self.each))
        self._gauge()
        self._state.condition.notify_all()

    def _gauge(self) -> None:
        gauge("sampler replicas", len(self.each) - len(self._away))

    async def _on_each(self, change: Callable[[Sampler], Awaitable[T]]) -> list[T]:
        """Change all available replicas. Returns the results of those that survived it."""
        incarnations = [self.incarnation(number) for number in self.available.tolist()]
        tasks = [asyncio.ensure_future(change(self.each[number])) for number, _ in incarnations]
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        results: list[T] = []
        for incarnation, task in zip(incarnations, tasks, strict=True):
            try:
                results.append(task.result())
            except Exception as error:
                if not died(error) and not self.is_over(incarnation):
                    raise
                self.failed(incarnation, error)
        return results

    async def outlive(self, draw: Callable[[], Awaitable[T]], prompts: int) -> T:
        """Make a call outside the stream with `prompts` prompts, and repeat it if a replica dies.

        Raises DataError if one replica after another dies of it.
        """
        dead: list[int] = []
        while True:
            await self._state.condition.wait_for(
                lambda: len(self._away) < len(self.each), "a call outside the stream", "a replica", self.why_not
            )
            incarnations = [self.incarnation(number) for number in range(len(self.each))]
            try:
                return await draw()
            except MeshStopped:  # a dead one was restarted during the call
                if not any(map(self.is_over, incarnations)):
                    raise
            except (RankDied, RankFailed) as error:
                if not died(error):
                    raise
                incarnation = incarnations[error.rank if len(self.each) > 1 else 0]
                dead.append(incarnation[0])
                _check_call(prompts, dead, error, len(self.each))
                self.failed(incarnation, error)


class PoisonRows:
    """Finds rows that crash every replica that samples them, by counting crashes. It needs no clock and no tasks."""

    def __init__(self) -> None:
        self._deaths: dict[int, list[int]] = {}
        """By group, the replicas that have died since it was last sampled to its end."""

    def died(self, replica: int, drawing: Mapping[int, object], error: Exception) -> None:
        """Record the death of a replica. DataError if one of the groups that it sampled has now ended too many.

        `drawing`: the prompt of each group.
        """
        for label in drawing:
            self._deaths.setdefault(label, []).append(replica)
        fatal = [label for label in drawing if len(self._deaths[label]) >= _FATAL]
        if fatal:
            named = ", ".join(f"{label} ({shortened(drawing[label])})" for label in fatal[:_NAMED])
            more = f" and {len(fatal) - _NAMED} more" if len(fatal) > _NAMED else ""
            group, this = ("group", "this") if len(fatal) == 1 else ("groups", "this, or one of them,")
            raise DataError(f"{group} {named}{more}: drawing {this} kills {_deaths(self._deaths[fatal[0]], error)}")

    def drawn(self, labels: Iterable[int]) -> None:
        """Clear groups that are complete, because no replica died of them."""
        for label in labels:
            self._deaths.pop(label, None)


def _check_call(prompts: int, dead: Sequence[int], error: Exception, replicas: int) -> None:
    """Raise DataError if a call outside the stream has ended too many replicas in a row.

    Such a call uses all replicas at once and is lost with any of them. So it takes more deaths than for one row to rule
    out bad luck.
    """
    if len(dead) >= _FATAL * replicas:
        raise DataError(f"a call outside the stream, with {prompts} prompts, kills {_deaths(dead, error)}")


def _deaths(replicas: Sequence[int], error: Exception) -> str:
    return (
        f"the sampler's replicas: {len(replicas)} died of it one after another (numbers "
        f"{', '.join(map(str, replicas))}), and it is not drawn again. Leave the row out, or bound what it takes, as "
        f"by sampling.max_tokens. The last death: {described(error)}"
    )


async def outlive(sampler: Sampler, call: Callable[[], Awaitable[T]]) -> T:
    """Make a call on a sampler outside any stream, and repeat it without a dead replica if `min_ranks` are left."""
    each, enough = replicas(sampler), min_ranks(sampler)
    if sampler in newest and all(map(is_away, each)):  # a stream that has closed left them like this
        await _bring_back(each, enough or len(each), newest[sampler])
    while True:
        try:
            return await call()
        except (RankDied, RankFailed) as error:
            left = sum(not is_away(replica) for replica in each) - 1
            if not died(error) or not enough or left < enough:
                raise
            log.warning("a replica of the sampler is away until a stream begins", error=str(error))
            leave_out(each[error.rank])


async def _bring_back(each: Sequence[Sampler], enough: int, loaded: Loaded) -> None:
    """Restart replicas until `enough` of them are available."""

    async def again(replica: Sampler) -> None:
        await respawn(replica)
        for weights in loaded.values():
            await measured(await replica.load(weights))
        take_in(replica)

    coming = [asyncio.ensure_future(again(replica)) for replica in each]
    try:
        for came in islice(asyncio.as_completed(coming), enough):
            await came
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)


def died(error: BaseException) -> bool:
    """True if a sampler is unusable until it is respawned."""
    return isinstance(error, RankDied) or (isinstance(error, RankFailed) and isinstance(error.__cause__, EngineDied))
