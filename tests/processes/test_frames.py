"""Frames arrive whole and in their order, however the bytes come."""

import asyncio
import socket
import struct
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from meshrl.engines.transport import Connection


def framed(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


async def received(parts: list[bytes]) -> list[bytes]:
    """The frames that come of these bytes, each part read before the next is sent."""
    ours, theirs = socket.socketpair()
    frames: list[bytes] = []
    ended = asyncio.Event()
    connection = Connection(ours, frames.append, ended.set)
    for part in parts:
        theirs.sendall(part)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    theirs.close()
    await asyncio.wait_for(ended.wait(), 20)
    connection.close()
    return frames


@given(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(0, 2000), max_size=12))
@example([b"", b"x"], [1, 2, 3, 4, 5, 6, 7, 8])
def test_any_split_of_the_bytes_gives_the_same_frames(frames: list[bytes], cuts: list[int]) -> None:
    whole = b"".join(map(framed, frames))
    places = [0, *sorted({min(cut, len(whole)) for cut in cuts}), len(whole)]
    assert asyncio.run(received([whole[start:stop] for start, stop in pairwise(places)])) == frames


@given(st.lists(st.binary(max_size=300), max_size=4), st.binary(min_size=1, max_size=300), st.data())
def test_the_frame_that_is_cut_off_is_never_seen(frames: list[bytes], last: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(framed(last)) - 1))
    whole = b"".join(map(framed, frames))
    assert asyncio.run(received([whole + framed(last)[:cut]])) == frames


async def test_frames_of_more_than_a_socket_takes_wait_for_their_reader() -> None:
    ours, theirs = socket.socketpair()
    sent = [bytes([number]) * size for number, size in enumerate([3, 5_000_000, 0, 2_000_000, 1])]
    frames: list[bytes] = []
    whole, ended = asyncio.Event(), asyncio.Event()
    writer = Connection(ours, frames.append, ended.set)
    for frame in sent:
        writer.send(frame)
    await asyncio.sleep(0.05)  # the reader is slow

    def arrived(frame: bytes) -> None:
        frames.append(frame)
        if len(frames) == len(sent):
            whole.set()

    reader = Connection(theirs, arrived, ended.set)
    await asyncio.wait_for(whole.wait(), 20)
    assert frames == sent
    reader.close()
    await asyncio.wait_for(ended.wait(), 20)
    writer.send(b"to nobody")
    writer.close()
