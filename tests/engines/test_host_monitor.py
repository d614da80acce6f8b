import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from meshrl.engines.remote import HealthPort, HostMonitor, ProcessExited, Reply
from meshrl.events import clock
from meshrl.testing import simulate

PORT = HealthPort("10.0.0.7", 6380, patience=10.0)

Probe = Callable[[HealthPort], Awaitable[bool]]


class Rank:
    lost: float | None = None

    def __init__(self) -> None:
        self.waited: list[Reply] = []

    def ask(self, monitor: HostMonitor) -> Reply:
        self.waited.append(reply := Reply())
        monitor.watch(reply, self)
        return reply

    def lose(self, reason: str) -> None:
        self.lost = clock()
        for reply in self.waited:
            reply.arrive(None, ProcessExited(reason))


def host(*away: tuple[float, float], delay: float = 0.0) -> Probe:
    """One that answers after a delay, but for what it is sent, or would answer, in these spans."""

    async def probe(port: HealthPort) -> bool:
        sent = clock()
        await asyncio.sleep(delay)
        if any(begin <= each < end for begin, end in away for each in (sent, clock())):
            await asyncio.sleep(port.patience)
            return False
        return True

    return probe


def watched(probe: Probe, seconds: float) -> float | None:
    async def scenario() -> float | None:
        monitor, rank = HostMonitor(PORT, probe), Rank()
        reply = rank.ask(monitor)
        asyncio.get_running_loop().call_later(seconds, reply.arrive, "the answer")
        await reply.wait()
        await asyncio.sleep(2 * PORT.patience)
        assert rank.lost is not None or reply.value == "the answer"
        return rank.lost

    return simulate(scenario)


def test_a_host_that_is_silent_for_its_patience_is_given_up_and_no_other() -> None:
    for begin in (0.0, 5.0, 5.5, 99.99):
        lost = watched(host((begin, 3600)), 3600)
        assert lost is not None, begin
        assert begin + PORT.patience <= lost <= begin + 1.2 * PORT.patience, begin
    living = {
        "it answers a call that lasts": (host(), 3600),
        "it is slow": (host(delay=5), 3600),
        "it is away at first": (host((0, 5)), 60),
        "it is away for a while": (host((5, 10)), 60),
        "it is away between two probes": (host((5.5, 10.5)), 60),
        "it is away again and again": (host(*((float(begin), begin + 6.0) for begin in range(0, 600, 8))), 600),
    }
    assert {why: lost for why, case in living.items() if (lost := watched(*case)) is not None} == {}


def test_all_who_wait_are_told_and_what_comes_later_does_not_count() -> None:
    async def scenario() -> None:
        monitor, one, other = HostMonitor(PORT, host((0, 3600))), Rank(), Rank()
        first = one.ask(monitor)
        await asyncio.sleep(5)
        second = other.ask(monitor)
        await second.wait()
        assert one.lost == other.lost == clock()
        reason = r"nothing was heard of its host \(10.0.0.7\) for 10 s, which is run.patience"
        with pytest.raises(ProcessExited, match=reason):
            await first
        first.arrive("late")
        assert first.value is None
        third = one.ask(monitor)  # on the same host, which is asked anew
        assert not third.done
        await third.wait()
        await asyncio.sleep(PORT.patience)

    simulate(scenario)


async def test_what_this_process_sleeps_is_no_silence_of_the_host() -> None:
    probes = 0

    async def probe(_: HealthPort) -> bool:
        nonlocal probes
        probes += 1
        return True

    async def more(count: int) -> None:
        until = probes + count
        while probes < until:  # noqa: ASYNC110 -- as many pauses of the monitor
            await asyncio.sleep(0.01)

    monitor, rank = HostMonitor(HealthPort("", 0, patience=0.5), probe), Rank()
    reply = rank.ask(monitor)
    await more(1)
    time.sleep(1)  # noqa: ASYNC251 -- as a controller does that computes
    await more(3)
    assert rank.lost is None
    reply.arrive(None)
