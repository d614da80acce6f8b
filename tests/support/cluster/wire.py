"""A cable with a delay, losses and a rate, which carries frames between two devices of the switch.

It replaces netem if the kernel has none. It is run by its path and imports nothing of meshrl. Each line of its
standard input sets the properties of the cable.
"""

import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_SET_NAME = 0x400454CA
_TAP = 0x0002 | 0x1000  # whole Ethernet frames without a header
_FRAME = 1 << 16
_ROOM = 1000
"""Frames in transit at most, as in netem. Others are lost."""
_AT_ONCE = 64


class Way:
    def __init__(self, end: int, seed: int) -> None:
        self.delay: float = 0.0
        self.loss: float = 0.0
        self.rate: float | None = None
        self._end = end
        self._luck = random.Random(seed)
        self._free = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take(self, frame: bytes) -> None:
        if self._luck.random() < self.loss or len(self._under_way) >= _ROOM:
            return
        self._free = max(self._free, time.monotonic())
        if self.rate:
            self._free += 8 * len(frame) / self.rate
        self._under_way.append((self._free + self.delay, frame))

    def send(self) -> float | None:
        """Send frames that are due. Returns the seconds until the next one, None if none is in transit."""
        while self._under_way:
            left = self._under_way[0][0] - time.monotonic()
            if left > 0:
                return left
            with suppress(OSError):  # the device at the other end is down
                os.write(self._end, self._under_way.popleft()[1])
        return None


def opened(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_NAME, struct.pack("16sH22x", name.encode(), _TAP))
    return device


def carry(ends: tuple[int, int]) -> None:
    """Carry frames until standard input ends."""
    ways = {ends[0]: Way(ends[1], 0), ends[1]: Way(ends[0], 1)}
    while True:
        waits = [left for way in ways.values() if (left := way.send()) is not None]
        readable, _, _ = select.select([0, *ends], [], [], min(waits, default=None))
        for end in readable:
            if end == 0:
                told = os.read(0, 4096)
                if not told:
                    return
                numbers = json.loads(told.splitlines()[-1])
                for way in ways.values():
                    way.delay, way.loss, way.rate = numbers["delay"], numbers["loss"], numbers["rate"]
                continue
            for _ in range(_AT_ONCE):
                try:
                    ways[end].take(os.read(end, _FRAME))
                except BlockingIOError:
                    break


if __name__ == "__main__":
    _ends = opened(sys.argv[1]), opened(sys.argv[2])
    os.write(1, b"ready\n")
    carry(_ends)
