"""The replicas of a sampler: which are available, and how a dead one returns with the newest weights."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from itertools import islice
from typing import Final, Never, TypeAlias, TypeVar

import numpy as np

from meshrl import log
from meshrl.data import Batch, Weights
from meshrl.errors import (
    ConfigError,
    EngineDied,
    MeshStopped,
    NoRoom,
    OtherVersions,
    RankDied,
    RankFailed,
    is_lost,
)
from meshrl.events import gauge
from meshrl.mesh import Rows, is_away, leave_out, min_ranks, replicas, respawn, take_in
from meshrl.overlap.condition import Condition
from meshrl.overlap.replay import load_alone, newest
from meshrl.overlap.suspects import check_call
from meshrl.roles import Sampler

T = TypeVar("T")

Life: TypeAlias = tuple[int, int]
"""A replica's number, and how many of its lives have ended."""

_LONGEST: Final = 60.0
"""Most seconds between two attempts to restart a replica that keeps dying."""


class Replicas:
    """The replicas of a sampler: its ranks if they are independent, else the sampler as a whole.

    All calls leave out a replica that dies. It is restarted while the others continue, and gets the newest weights
    before any rows. A death uses one of the `retries`, except on a mesh with `min_ranks`.
    """

    def __init__(
        self,
        sampler: Sampler,
        retries: int,
        condition: Condition,
        start: Callable[[Coroutine[Never, Never, None]], None],
        changed: Callable[[str, tuple[Life, Exception] | None], None],
    ) -> None:
        """`start`: as in `StreamState`. `changed` gets a description, and the life that ended with its error."""
        self.each: list[Sampler] = replicas(sampler)
        self._sampler = sampler
        self._min_ranks = min_ranks(sampler)
        self._retries = retries
        self._condition = condition
        self._start = start
        self._changed = changed
        self._ended = [0] * len(self.each)
        """Number of ended lives of each replica."""
        self._away: dict[int, Exception | None] = {}
        """Unavailable replicas, with the error that ended them. None if they were never available."""
        self._idle = [0] * len(self.each)
        """Number of successive lives of each replica that ended without a row."""
        self._weights: Weights | None = None
        """The newest weights, which a restarted replica gets."""
        self._changing = asyncio.Lock()
        """Held while weights are loaded, or a replica is taken in."""
        self._restarts = False
        """True from the first sampling to the end of the stream, which cancels restarts that are under way."""

    def begin(self) -> None:
        """Restart those that died before, and wait for those that are not available yet."""
        self._weights = newest.get(self._sampler, self._weights)  # those published so far
        self._restarts = True
        for number, replica in enumerate(self.each):
            if is_away(replica):
                self._away.setdefault(number, None)
                self._start(self._return(number))
            else:  # a call outside the stream may have brought it back
                self._away.pop(number, None)

    def end(self) -> None:
        """Store the weights for the next restart of an absent replica, because no stream manages the replicas now."""
        self._restarts = False
        if self._away and self._weights is not None:
            newest[self._sampler] = self._weights

    @property
    def here(self) -> Rows:
        """The numbers of available replicas, int64."""
        return np.array([number for number in range(len(self.each)) if number not in self._away], np.int64)

    @property
    def are_enough(self) -> bool:
        """True if enough replicas are available to sample rows."""
        return len(self.each) - len(self._away) >= max(1, self._min_ranks)

    def why_not(self) -> str:
        """Describe the missing replicas."""
        wanted = max(1, self._min_ranks)
        told = "; ".join(f"replica {number}: {error or 'not there yet'}" for number, error in self._away.items())
        count = len(self.each)
        return f"{count - len(self._away)} of {count} replicas of the sampler are there, and {wanted} wanted: {told}"

    def life(self, number: int) -> Life:
        """Return the present life of a replica."""
        return number, self._ended[number]

    def is_over(self, life: Life) -> bool:
        """True if the end of this life has been handled."""
        return self._ended[life[0]] > life[1]

    def came(self, number: int) -> None:
        """Note that rows arrived from a replica."""
        self._idle[number] = 0

    async def load(self, weights: Weights) -> Batch | None:
        """Load weights into all available replicas, and later into each new one. Returns the results, if any."""
        async with self._changing:
            self._weights = weights
            given = weights.read_by(len(self.here))
            places = await self._on_each(lambda replica: replica.load(given))
            return Batch.concat(places) if places else None

    async def abort(self) -> None:
        """Abort the running calls."""
        async with self._changing:
            await self._on_each(lambda replica: replica.abort())

    def failed(self, life: Life, error: Exception) -> None:
        """Handle the failure of a call in this life of a replica. Raises the error if it cannot be survived."""
        number = life[0]
        if self.is_over(life):
            return
        self._pay(number, error)
        self._ended[number] += 1
        if died(error):
            leave_out(self.each[number])
            if not is_away(self.each[number]):
                raise error  # it is on no mesh, so nobody can restart it
            self._away[number] = error
            if self._restarts:
                self._start(self._return(number))
            self._tell()
        dead = (life, error) if died(error) else None
        self._changed(f"rows were lost with replica {number} of its sampler and drawn again", dead)
        self._condition.notify_all()

    def _pay(self, number: int, error: Exception) -> None:
        """Count the error, or raise it if its loss cannot be repeated."""
        alone = len(self._away.keys() | {number}) == len(self.each)
        unknown = self._weights is None and alone  # no replica has its weights
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

    async def _return(self, number: int) -> None:
        """Restart a replica, however long that takes, and take it in."""
        gone: Weights | None = None
        while True:
            if self._idle[number] > 1:
                await asyncio.sleep(min(_LONGEST, 2.0 ** (self._idle[number] - 2)))
            self._idle[number] += 1
            given = gone
            try:
                await respawn(self.each[number])
                await self._condition.wait_quietly_for(partial(self._has_others, gone))
                async with self._changing:
                    given = self._weights
                    if given is not None:
                        await load_alone(self.each[number], given)
                    self._take_in(number)
                return
            except (RankDied, RankFailed, ConfigError) as again:
                if is_lost(again) and given is not None and not given.lasts:
                    gone = given  # the policy has moved on, and newer weights will come
                    continue
                waits = self.are_enough or isinstance(again, NoRoom | OtherVersions)  # another machine may come
                if not died(again) and not (self._min_ranks and waits):
                    raise
                self._pay(number, again)
                self._ended[number] += 1
                self._away[number] = again

    def _has_others(self, gone: Weights | None) -> bool:
        """True if there are weights other than these. With None, True if there are any."""
        return self._weights is not gone

    def _take_in(self, number: int) -> None:
        del self._away[number]
        take_in(self.each[number])
        self._changed(f"replica {number} of its sampler came while it ran", None)
        log.info("a replica of the sampler is available", replica=number, of=len(self.each))
        self._tell()
        self._condition.notify_all()

    def _tell(self) -> None:
        gauge("sampler replicas", len(self.each) - len(self._away))

    async def _on_each(self, change: Callable[[Sampler], Awaitable[T]]) -> list[T]:
        """Change all available replicas. Returns the results of those that survived it."""
        lives = [self.life(number) for number in self.here.tolist()]
        tasks = [asyncio.ensure_future(change(self.each[number])) for number, _ in lives]
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
        results: list[T] = []
        for life, task in zip(lives, tasks, strict=True):
            try:
                results.append(task.result())
            except Exception as error:
                if not died(error) and not self.is_over(life):
                    raise
                self.failed(life, error)
        return results

    async def outlive(self, draw: Callable[[], Awaitable[T]], prompts: int) -> T:
        """Make a call outside the stream with `prompts` prompts, and repeat it if a replica dies.

        Raises DataError if one replica after another dies of it.
        """
        dead: list[int] = []
        while True:
            there = self._condition.wait_for(
                lambda: len(self._away) < len(self.each), "a call outside the stream", "a replica", self.why_not
            )
            await there
            lives = [self.life(number) for number in range(len(self.each))]
            try:
                return await draw()
            except MeshStopped:  # a dead one was restarted during the call
                if not any(map(self.is_over, lives)):
                    raise
            except (RankDied, RankFailed) as error:
                if not died(error):
                    raise
                life = lives[error.rank if len(self.each) > 1 else 0]
                dead.append(life[0])
                check_call(prompts, dead, error, len(self.each))
                self.failed(life, error)


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


async def _bring_back(each: Sequence[Sampler], enough: int, weights: Weights) -> None:
    """Restart replicas until `enough` of them are available."""

    async def again(replica: Sampler) -> None:
        await respawn(replica)
        await load_alone(replica, weights)
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
