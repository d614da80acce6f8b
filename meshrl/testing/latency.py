"""Roles that take time or fail: any actor class, with random latencies and crashes from a seed."""

import asyncio
import functools
import inspect
import itertools
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
"""Called before an actor makes a call or yields a stream's value."""


class Crash(Exception):
    """Raised by a role that was set to crash."""


class Latency(ABC):
    """A distribution of durations."""

    @abstractmethod
    def draw(self, random: Random, batch: Batch | None) -> float:
        """Draw the seconds of a call with this batch among its arguments, or of a stream's value."""


@dataclass(frozen=True)
class Lognormal(Latency):
    """Seconds with this mean. `sigma`: standard deviation of their logarithm, 1 for long tails as of completions."""

    mean: float
    sigma: float

    def draw(self, random: Random, batch: Batch | None) -> float:
        """Draw one value."""
        return random.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


@dataclass(frozen=True)
class _Constant(Latency):
    seconds: float

    def draw(self, random: Random, batch: Batch | None) -> float:
        return self.seconds


@dataclass(frozen=True)
class Recorded(Latency):
    """One of these seconds, with equal probability."""

    seconds: Sequence[float]

    @classmethod
    def of(cls, events: Path | str, endpoint: str) -> "Recorded":
        """The durations of an endpoint's calls on ranks of a run, from its events: `"TorchPolicy.update"`.

        If the run recorded no ranks, the durations that callers saw. Raises DataError if there is no such call.
        """
        recorded = msgspec.json.Decoder(Event).decode_lines(Path(events).read_bytes())
        calls = [each for each in recorded if isinstance(each, Call | Span)]
        named = [each for each in calls if f"{each.actor}.{each.endpoint}" == endpoint]
        spans = [each for each in named if isinstance(each, Span)] or named
        if not spans:
            has = ", ".join(sorted({f"{each.actor}.{each.endpoint}" for each in calls})) or "none at all"
            raise DataError(f"{events}: no call of {endpoint}; it has calls of {has}")
        return cls([each.ended - each.began for each in spans])

    def draw(self, random: Random, batch: Batch | None) -> float:
        """Draw one of them."""
        return random.choice(self.seconds)


@dataclass(frozen=True)
class _Per(Latency):
    latency: Latency
    count: Callable[[Batch], int]

    def draw(self, random: Random, batch: Batch | None) -> float:
        if batch is None:
            raise DataError("a latency by row or by token is of an endpoint that takes or yields a Batch")
        return self.latency.draw(random, batch) * self.count(batch)


def per_row(latency: Latency | float) -> Latency:
    """This time for each row of the batch that a call gets or a stream yields."""
    return _Per(_latency(latency), len)


def per_token(latency: Latency | float) -> Latency:
    """This time for each token of the batch that a call gets or a stream yields."""
    return _Per(_latency(latency), lambda batch: int(batch.lengths.sum()))


def delayed(role: C, /, *, seed: int = 0, **latencies: Latency | float) -> C:
    """Return the role with durations for its endpoints: `delayed(FakeSampler, generate=Lognormal(2, 0.5), load=0.1)`.

    A call waits before its work. A stream waits after it has made a value, so the value has the versions of its start.
    """

    def pausing(name: str, latency: Latency) -> Before:
        key = f"delayed {name} {seed}"

        async def pause(actor: Actor, batch: Batch | None) -> None:
            generators: dict[str, Random] = vars(actor).setdefault("_meshrl_random", {})
            if key not in generators:  # each rank has its own
                generators[key] = Random(f"{key} {current_rank().index}")
            await asyncio.sleep(latency.draw(generators[key], batch))

        return pause

    return _derived(role, {name: pausing(name, _latency(latency)) for name, latency in latencies.items()})


def crashing(role: C, /, *, seed: int = 0, **crashes: Collection[int] | float) -> C:
    """Return a failing role: `crashing(FakeReward, score=[3])` raises `Crash` in place of the third value, from 1.

    The values of a stream count one by one, so it fails before its first value or between two. A number instead of a
    list is the probability of a failure: `generate=0.05`. Values are counted over all actors of the returned class. So
    a respawned actor does not crash at the same place again.
    """

    def failing(name: str, when: Collection[int] | float) -> Before:
        values = itertools.count(1)
        random = Random(f"crashing {name} {seed}")

        async def fail(_: Actor, __: Batch | None) -> None:
            value = next(values)
            if random.random() < when if isinstance(when, int | float) else value in when:
                raise Crash(f"{role.__name__}.{name} was told to crash at its value {value}")

        return fail

    return _derived(role, {name: failing(name, when) for name, when in crashes.items()})


def _latency(latency: Latency | float) -> Latency:
    return latency if isinstance(latency, Latency) else _Constant(latency)


def _derived(role: C, befores: dict[str, Before]) -> C:
    """A subclass of the same name with these `befores`, by the name of an endpoint."""
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
