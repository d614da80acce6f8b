"""Batches requests of all sessions into shared calls of a sampler's `generate`.

A request waits briefly for others, because one call per row would cost more than the wait. It never waits for a running
call to end.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.agents.conversation import Drawn, Ints
from meshrl.data import ADAPTER, CONSTRAINT, FINGERPRINTS, IMAGES, Batch, Images, Ragged, Source, masked_spans
from meshrl.errors import DataError
from meshrl.mesh import is_away, lightest, parts, routed
from meshrl.roles import JoinedSampling, Sampler, Sampling
from meshrl.user_code import unless_cancelled

_PAUSE: Final = 0.005
"""Seconds from the first waiting row to the call that draws it."""


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt and its text, as the model said it, cut before a stop text."""

    drawn: Drawn
    text: str


@dataclass(eq=False)
class _Pending:
    """A row that a sampler is to continue."""

    text: str
    tokens: Ints
    learnt: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: Ints
    prompt: int
    """Number of the prompt's tokens."""
    max_tokens: int
    adapter: str | None
    constraint: str | None
    images: Images | None
    """A column of one row."""
    done: asyncio.Future[Answer]


class RequestBatcher:
    """Draws answers from a sampler that others may use too."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._loads = np.zeros(parts(sampler.generate), np.int64)
        """Tokens that each part of the sampler may still draw. Calls have few rows, and these must spread over all
        parts."""
        self._waiting: dict[Sampling, list[_Pending]] = {}
        """Waiting rows by sampling parameters. A call has one set of them."""
        self._calls: set[asyncio.Task[None]] = set()
        self._woken = False
        self._paused = False
        self._closed = False

    async def draw(
        self,
        prompt: Ints,
        text: str,
        sampling: Sampling,
        max_tokens: int | None,
        stop: Sequence[str],
        adapter: str | None = None,
        constraint: str | None = None,
        images: Images | None = None,
    ) -> Answer:
        """Draw after a prompt, int[tokens]. Returns no tokens if the model has no room.

        Raises what the sampler raises, and DataError if this is closed. `text` is that of a prompt without messages, or
        "". `max_tokens` lowers the limit of `sampling`. `stop` adds texts that end the answer. `adapter`: the one that
        draws it, as rows name it. `constraint`: the text of what holds the answer. `images`: those of the prompt, a
        column of one row.
        """
        if self._closed:
            raise DataError("the gateway is closed, and draws nothing more: make another")
        size, most = len(prompt), sampling.max_tokens
        pending = _Pending(
            text=text,
            tokens=prompt,
            learnt=np.zeros(size, np.bool_),
            logprobs=np.zeros(size, np.float32),
            versions=np.full(size, -1, np.int32),
            prompt=size,
            max_tokens=most if max_tokens is None else min(most, max_tokens),
            adapter=adapter,
            constraint=constraint,
            images=images if images and any(images) else None,
            done=asyncio.get_running_loop().create_future(),
        )
        stops = tuple(dict.fromkeys((*sampling.stop, *stop)))
        drawn = sampling if sampling.beside else JoinedSampling.model_validate(sampling.model_dump())
        self._wait(drawn.model_copy(update={"n": 1, "stop": stops}), pending)
        return await pending.done  # a cancelled caller gives up the row

    def pause(self) -> None:
        """Start no call until `resume`. Running calls continue."""
        self._paused = True

    def resume(self) -> None:
        """Start calls again, first for the waiting rows."""
        self._paused = False
        self._wake()

    async def close(self) -> None:
        """Cancel running calls and refuse new ones. Callers that wait for an answer get CancelledError."""
        self._closed = True
        for pending in [each for some in self._waiting.values() for each in some]:
            pending.done.cancel()
        self._waiting.clear()
        for call in (calls := list(self._calls)):
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def _wait(self, sampling: Sampling, pending: _Pending) -> None:
        self._waiting.setdefault(sampling, []).append(pending)
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_later(_PAUSE, self._begin)

    def _begin(self) -> None:
        self._woken = False
        if self._paused:
            return
        waiting, self._waiting = self._waiting, {}
        for sampling, every in waiting.items():
            rows = [pending for pending in every if not pending.done.done()]
            if rows:
                unanswered = set(rows)
                call = asyncio.create_task(self._call(sampling, rows, unanswered))
                self._calls.add(call)
                call.add_done_callback(partial(self._ended, unanswered))
                for pending in rows:
                    pending.done.add_done_callback(partial(_cancel_if_unwanted, unanswered, call))

    def _ended(self, unanswered: set[_Pending], call: asyncio.Task[None]) -> None:
        for pending in unanswered:
            pending.done.cancel()
        self._calls.discard(call)

    async def _call(self, sampling: Sampling, rows: Sequence[_Pending], unanswered: set[_Pending]) -> None:
        """`unanswered`: rows that this call must answer. An aborted row may already be in the next call."""
        batch = _batch(rows)
        costs = np.array([pending.max_tokens for pending in rows], np.int64)
        owners = lightest(costs, self._loads)
        np.add.at(self._loads, owners, costs)
        generate = self._sampler.generate if is_away(self._sampler) else routed(self._sampler.generate, owners)
        try:
            async for chunk in generate(batch.part(np.arange(len(rows))), sampling):
                drawn = await chunk.load()
                for index, number in enumerate(drawn.row("request").tolist()):
                    self._loads[owners[number]] -= costs[number]
                    costs[number] = 0
                    unanswered.discard(rows[number])
                    self._take(sampling, rows[number], drawn, index)
            if unanswered:
                raise DataError(f"the sampler ended a call without {len(unanswered)} of its {len(rows)} rows")
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 -- each caller gets it
            unless_cancelled(error)
            for pending in unanswered:
                if not pending.done.done():
                    pending.done.set_exception(error)
        finally:
            np.subtract.at(self._loads, owners, costs)

    def _take(self, sampling: Sampling, pending: _Pending, batch: Batch, row: int) -> None:
        """Finish a row, or queue it again if it was aborted. Its caller may have gone."""
        if pending.done.done():
            return
        tokens, versions = np.array(batch.tokens[row], np.int32), np.array(batch.versions[row], np.int32)
        logprobs = np.array(batch.sampler_logprobs[row], np.float32)
        if batch.row("aborted")[row]:
            pending.tokens, pending.logprobs, pending.versions = tokens, logprobs, versions
            pending.learnt = np.array(batch.loss_mask[row], np.bool_)
            self._wait(sampling, pending)
            return
        new = slice(pending.prompt, None)
        temperature, truncated = float(batch.row("temperature")[row]), bool(batch.row("truncated")[row])
        experts = np.array(batch.ragged("experts")[row], np.int16) if "experts" in batch else None
        spans = masked_spans(batch.select([row]))[0]
        mask = spans[0][2] if spans else None
        seen = cast("Sequence[str]", batch.objects(FINGERPRINTS)[row]) if FINGERPRINTS in batch else None
        found = Drawn(tokens[new], logprobs[new], versions[new], temperature, truncated, experts, mask, seen)
        pending.done.set_result(Answer(found, str(batch.objects("completion")[row])))


def _cancel_if_unwanted(unanswered: set[_Pending], call: asyncio.Task[None], _: asyncio.Future[Answer]) -> None:
    if unanswered and all(pending.done.done() for pending in unanswered):
        call.cancel()


def _batch(rows: Sequence[_Pending]) -> Batch:
    """A batch of rows to continue, each limited to the tokens that the model has room for."""
    adapters, constraints = [pending.adapter for pending in rows], [pending.constraint for pending in rows]
    more: dict[str, list[str | None] | Images] = {
        name: values
        for name, values in ((ADAPTER, adapters), (CONSTRAINT, constraints))
        if any(each is not None for each in values)
    }
    if any(pending.images for pending in rows):
        more[IMAGES] = Images.joined([pending.images or Images([()], {}) for pending in rows])
    return Batch.of(
        **more,
        prompt=[pending.text for pending in rows],
        observation=[None] * len(rows),
        tokens=Ragged.of([pending.tokens for pending in rows], np.int32),
        loss_mask=Ragged.of([pending.learnt for pending in rows], np.bool_),
        sampler_logprobs=Ragged.of([pending.logprobs for pending in rows], np.float32, source=Source("sampler")),
        versions=Ragged.of([pending.versions for pending in rows], np.int32),
        max_tokens=np.array([pending.max_tokens for pending in rows], np.int64),
        request=np.arange(len(rows)),
    )
