"""Calls that decode together: each step is one forward pass over the rows of all of them.

Many small calls would otherwise be decoded in many small passes, and each costs almost as much as a large one. A
row's samples depend only on its call's seed. The last bits of its log-probs may depend on the rows next to it, so calls
join only with `JoinedSampling`.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from meshrl.roles import GenerateCall
from meshrl_torch.sample.decoder import Decoder
from meshrl_torch.sample.draw import UInt64
from meshrl_torch.sample.rollouts import Finished, Request

YIELD_STEPS: Final = 8
"""Decode steps between two batches of finished rows. Making a batch costs as much as a step of a tiny model."""


class Part:
    """One of the calls."""

    def __init__(self, call: GenerateCall, number: int) -> None:
        self.call = call
        self.number = number
        self.ended = False
        self.error: Exception | None = None
        self.news = asyncio.Event()

    def end(self, error: Exception | None = None) -> None:
        """End the call: no more rows come."""
        self.ended, self.error = True, error
        self.call.end()
        self.news.set()


class Joint:
    """The running calls, and the task that steps them."""

    def __init__(self, decoder: Decoder, version: Callable[[], int]) -> None:
        """`version`: returns that of the weights before each step. Its error ends all calls."""
        self._decoder = decoder
        self._version = version
        self._parts: dict[int, Part] = {}
        """By number."""
        self._steps = 0
        self._stepping: asyncio.Task[None] | None = None

    @property
    def room(self) -> int:
        """Number of rows that another call may bring. 0 if all calls have ended."""
        return self._decoder.room if self._parts else 0

    def begin(self, call: GenerateCall, ended: Callable[[], None]) -> Part:
        """Add the call whose rows the decoder was made with. `ended` is called when all calls have ended."""
        part = self._parts[0] = Part(call, 0)
        self._stepping = asyncio.create_task(self._step())
        self._stepping.add_done_callback(lambda _: ended())
        return part

    def join(self, call: GenerateCall, request: Request, seed: UInt64) -> Part:
        """Add another call, for whose rows there is room."""
        number = self._decoder.add(request, seed)
        part = self._parts[number] = Part(call, number)
        return part

    async def finished(self, part: Part) -> Finished | None:
        """Return the next finished or aborted rows of a call. None if it has no more."""
        while True:
            await part.news.wait()
            part.news.clear()
            if part.error is not None:
                raise part.error
            if (rows := self._decoder.take(part.number)) is not None:
                if part.ended:
                    part.news.set()
                return rows
            if part.ended:
                return None

    def leave(self, part: Part) -> None:
        """Drop the unfinished rows of a call."""
        if self._parts.pop(part.number, None):
            self._decoder.stop(part.number)
        self._decoder.take(part.number)

    async def _step(self) -> None:
        try:
            while self._parts:
                await asyncio.sleep(0)  # others run, which may load weights; replays do not join
                for number, part in list(self._parts.items()):
                    if part.call.aborted:
                        self._decoder.stop(number)
                        self._parts.pop(number).end()
                    else:
                        part.call.count()
                if self._parts:
                    self._decoder.step(self._version())
                    self._tell()
        except Exception as error:  # noqa: BLE001 -- raised by each of the calls
            for part in self._parts.values():
                part.end(error)
            self._parts.clear()

    def _tell(self) -> None:
        self._steps += 1
        for number in self._decoder.finished:
            part = self._parts.get(number)
            if part is None:
                continue  # it has ended, and its rows are still to be taken
            if not self._decoder.has(number):
                del self._parts[number]
                part.end()
            elif self._steps % YIELD_STEPS == 0:
                part.news.set()
