"""Two ends of a process group: values in pieces, several at once, and what is told when one end is no more."""

import asyncio
import gc
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from meshrl.engines.ray.link import Link, Meeting
from meshrl.engines.ray.refs import PIECE, Flow
from meshrl.engines.ray.relay import _linked

HERE = "127.0.0.1"


def flow(words: int, *, here: bool) -> Flow:
    """Of two buffers, the first of some pieces and a part of one."""
    first = np.arange(words, dtype=np.uint32).view(np.uint8) if here else np.zeros(4 * words, np.uint8)
    first.flags.writeable = not here
    return Flow(b"head", [first, np.full(5, here, np.uint8)], here=here)


def content(of: Flow) -> bytes:
    return b"".join(piece.tobytes() for piece in of.pieces)


def begun(carry: Callable[[Flow, int], None], value: Flow, number: int, *, fails: bool = False) -> threading.Thread:
    def run() -> None:
        with pytest.raises(RuntimeError) if fails else nullcontext():
            carry(value, number)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_values_go_one_way_at_once_and_are_handed_on_while_they_come() -> None:
    second, last = Link(HERE, 600), Link(HERE, 600)
    first, middle = Link(HERE, 600, second.meeting), Link(HERE, 600, last.meeting)
    words = [PIECE, PIECE // 3]
    for _ in range(2):
        made = [flow(each, here=True) for each in words]
        passed, come = ([flow(each, here=False) for each in words] for _ in range(2))
        waits = [begun(last.receive, each, next(last.numbers)) for each in come]
        waits += [begun(middle.send, each, number) for number, each in enumerate(passed, next(last.numbers) - 2)]
        numbers = [next(second.numbers) for _ in words]
        waits += [begun(second.receive, each, number) for each, number in zip(passed, numbers, strict=True)]
        waits += [begun(first.send, each, number) for each, number in zip(made, numbers, strict=True)]
        for each in waits:
            each.join()
        assert [each.whole.done() for each in come] == [True, True]
        assert list(map(content, come)) == list(map(content, made))


SENDER = """
import os, sys, threading
import numpy as np
from meshrl.engines.ray.refs import PIECE, Flow
from meshrl.engines.ray.link import Link, Meeting
value = Flow(b"", [np.zeros(3 * PIECE, np.uint8)], here=False)
value.came(2)
link = Link("127.0.0.1", 600, Meeting("", "127.0.0.1", int(sys.argv[1])))
threading.Thread(target=link.send, args=(value, 0)).start()
sys.stdin.readline()
os._exit(1)
"""
"""Sends two pieces of three, and ends when it is told to."""


def test_a_sender_that_dies_fails_what_is_under_way_and_the_link() -> None:
    link = Link(HERE, 600)
    command = [sys.executable, "-c", SENDER, str(link.meeting.port)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    value = Flow(b"", [np.ones(3 * PIECE, np.uint8)], here=False)
    waits = begun(link.receive, value, 0, fails=True)
    assert not value.piece(1).any()
    assert not value.whole.done()
    sender.communicate("now\n")
    waits.join()
    assert "Connection" in str(value.whole.exception())
    with pytest.raises(RuntimeError):
        value.piece(2)
    later = Flow(b"", [np.ones(1, np.uint8)], here=False)
    with pytest.raises(RuntimeError, match="Connection"):
        link.receive(later, 1)
    assert later.whole.exception()


def test_what_does_not_come_within_the_patience_has_failed() -> None:
    second = Link(HERE, 0.5)
    first = Link(HERE, 0.5, second.meeting)
    here, small = flow(1, here=True), flow(1, here=False)
    waits = begun(first.send, here, 0)
    second.receive(small, 0)
    waits.join()
    with pytest.raises(RuntimeError, match="Timed out"):
        second.receive(flow(1, here=False), 1)
    with pytest.raises(RuntimeError):
        Link(HERE, 0.5, Meeting("", HERE, 9))  # where nobody is


def test_a_value_that_fails_on_its_way_fails_on_the_next_machine() -> None:
    coming = flow(PIECE, here=False)
    coming.came(1)
    second = Link(HERE, 1)
    first = Link(HERE, 1, second.meeting)
    ahead = flow(PIECE, here=False)
    waits = begun(first.send, coming, 0, fails=True)
    ends = begun(second.receive, ahead, 0, fails=True)
    assert ahead.piece(0).any() == 0
    coming.end(RuntimeError("as asked"))
    waits.join()
    ends.join()
    assert ahead.whole.exception()
    assert first.failed == "as asked"


async def test_a_link_that_nobody_uses_any_more_is_let_go_with_its_port() -> None:
    links = dict[str, asyncio.Task[Link]]()
    port = (await _linked(links, "one", partial(Link, HERE, 600), 600)).meeting.port
    assert (await _linked(links, "one", partial(Link, HERE, 600), 600)).meeting.port == port
    links["one"].result().used -= 601
    await _linked(links, "other", partial(Link, HERE, 600), 600)
    assert list(links) == ["other"]
    gc.collect()
    with pytest.raises(ConnectionRefusedError), socket.create_connection((HERE, port)):
        pass
