"""Roles that take time or fail: any actor class, with random latencies and crashes from a seed."""

import asyncio
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar, cast

import msgspec

from meshrl.data import Batch
from meshrl.errors import ContractError, DataError, did_you_mean
from meshrl.events import Call, Event, Span
from meshrl.mesh import Actor, current_rank

C = TypeVar("C", bound=type[Actor])
Before = Callable[[Actor, Batch | None], Awaitable[None]]
"""What happens on an actor before a value is given: of a call its result, of a stream each value."""


class Crash(Exception):
    """What a role raises that was told to crash."""


class Latency(ABC):
    """How many seconds something takes."""

    @abstractmethod
    def draw(self, random: Random, batch: Batch | None) -> float:
        """Seconds, for a call with this batch among its arguments; of a stream, for a value."""


@dataclass(frozen=True)
class Lognormal(Latency):
    """Seconds of this mean; `sigma` is the standard deviation of their logarithm. Long tails: 1, as of completions."""

    mean: float
    sigma: float

    def draw(self, random: Random, batch: Batch | None) -> float:
        """One value."""
        return random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


@dataclass(frozen=True)
class Recorded(Latency):
    """One of these seconds, each as likely."""

    seconds: Sequence[float]

    @classmethod
    def of(cls, events: Path | str, endpoint: str) -> "Recorded":
        """What the calls of an endpoint took on its ranks in a run, from its events: `"TorchPolicy.update"`.

        Where the run noted no ranks, what the callers saw. DataError where there was no such call.
        """
        decoder = msgspec.json.Decoder(Event)
        found = [decoder.decode(line) for line in Path(events).read_bytes().splitlines() if line]
        calls = [each for each in found if isinstance(each, Call | Span)]
        named = [each for each in calls if f"{each.actor}.{each.endpoint}" == endpoint]
        spans = [each for each in named if isinstance(each, Span)] or named
        if not spans:
            has = ", ".join(sorted({f"{each.actor}.{each.endpoint}" for each in calls})) or "none at all"
            raise DataError(f"{events}: no call of {endpoint}; it has calls of {has}")
        return cls([each.ended - each.began for each in spans])

    def draw(self, random: Random, batch: Batch | None) -> float:
        """One of them."""
        return random.choice(self.seconds)


@dataclass(frozen=True)
class _Constant(Latency):
    seconds: float

    def draw(self, random: Random, batch: Batch | None) -> float:
        return self.seconds


@dataclass(frozen=True)
class _Per(Latency):
    latency: Latency
    count: Callable[[Batch], int]

    def draw(self, random: Random, batch: Batch | None) -> float:
        if batch is None:
            raise DataError("a latency by row or by token is of an endpoint that takes or yields a Batch")
        return self.latency.draw(random, batch) * self.count(batch)


def per_row(latency: Latency | float) -> Latency:
    """So much for each row: of the batch that a call is given, or that a stream yields."""
    return _Per(_latency(latency), len)


def per_token(latency: Latency | float) -> Latency:
    """So much for each token: of the batch that a call is given, or that a stream yields."""
    return _Per(_latency(latency), lambda batch: int(batch.lengths.sum()))


def delayed(role: C, /, *, seed: int = 0, **latencies: Latency | float) -> C:
    """The role, with seconds that its endpoints take: `delayed(FakeSampler, generate=Lognormal(2, 0.5), load=0.1)`.

    A call takes its time before it does its work. A stream takes it after it has made a value, so that the versions in
    the value are those of when it was begun.
    """

    def pausing(name: str, latency: Latency) -> Before:
        async def pause(actor: Actor, batch: Batch | None) -> None:
            await asyncio.sleep(latency.draw(_random(actor, f"delayed {name} {seed}"), batch))

        return pause

    return _derived(role, {name: pausing(name, _latency(latency)) for name, latency in latencies.items()})


def crashing(role: C, /, *, seed: int = 0, **crashes: Collection[int] | float) -> C:
    """The role, failing: `crashing(FakeReward, score=[3])` raises `Crash` in place of the third value, counted from 1.

    The values of a stream count one by one, so it fails before its first one or between two. A number instead of a list
    is the chance that a value is not given: `generate=0.05`. Values are counted over all actors of the class that is
    returned: one that is respawned does not crash at the same place again.
    """

    def failing(name: str, when: Collection[int] | float) -> Before:
        given = 0
        random = Random(f"crashing {name} {seed}")

        async def fail(_: Actor, __: Batch | None) -> None:
            nonlocal given
            given += 1
            if random.random() < when if isinstance(when, int | float) else given in when:
                raise Crash(f"{role.__name__}.{name} was told to crash at its value {given}")

        return fail

    return _derived(role, {name: failing(name, when) for name, when in crashes.items()})


def _latency(latency: Latency | float) -> Latency:
    return latency if isinstance(latency, Latency) else _Constant(latency)


def _random(actor: Actor, key: str) -> Random:
    """The actor's own generator for a purpose; each rank has another one."""
    generators: dict[str, Random] = vars(actor).setdefault("_meshrl_random", {})
    if key not in generators:
        generators[key] = Random(f"{key} {current_rank().index}")
    return generators[key]


def _derived(role: C, befores: dict[str, Before]) -> C:
    """A subclass of the same name, in which something happens before values are given."""
    methods: dict[str, object] = {}
    for name, before in befores.items():
        method: object = getattr(role, name, None)
        if inspect.isasyncgenfunction(method):
            methods[name] = _stream(method, before)
        elif inspect.iscoroutinefunction(method):
            methods[name] = _call(method, before)
        else:
            known = [each for each in dir(role) if inspect.isroutine(getattr(role, each)) and not each.startswith("_")]
            hint = did_you_mean(name, known) or f"it has {', '.join(known)}"
            raise ContractError(f"{role.__name__} has no endpoint {name!r}: {hint}")
    return cast("C", type(role.__name__, (role,), {"__module__": role.__module__, "__doc__": role.__doc__} | methods))


def _call(method: Callable[..., Awaitable[object]], before: Before) -> Callable[..., Awaitable[object]]:
    @functools.wraps(method)
    async def call(self: Actor, *args: object, **kwargs: object) -> object:
        batches = (value for value in (*args, *kwargs.values()) if isinstance(value, Batch))
        await before(self, next(batches, None))
        return await method(self, *args, **kwargs)

    return call


def _stream(method: Callable[..., AsyncGenerator[object]], before: Before) -> Callable[..., AsyncGenerator[object]]:
    @functools.wraps(method)
    async def stream(self: Actor, *args: object, **kwargs: object) -> AsyncGenerator[object]:
        async with aclosing(method(self, *args, **kwargs)) as values:
            async for value in values:
                await before(self, value if isinstance(value, Batch) else None)
                yield value

    return stream
