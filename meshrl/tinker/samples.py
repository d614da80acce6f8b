"""Samples: requests for completions, under the weights of their sampling session, in turns between tenants."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshrl.agents import Answer, RequestBatcher
from meshrl.data import ADAPTER, Batch, Ragged
from meshrl.errors import DataError, MeshrlError
from meshrl.mesh import Array  # noqa: TC001
from meshrl.remote import Generate, Made, Packed
from meshrl.roles import JoinedSampling, Sampling
from meshrl.run import BesideSampling, is_machine_fault
from meshrl.tinker.models import Models, Version, version_of
from meshrl.tinker.queues import Conflict, Room, Turns
from meshrl.tinker.requests import JsonTensor, Sample
from meshrl.tinker.results import Drawn, Result, Sampled, TopK, nbytes_of

_MASKED: Final = -99999.0
"""The log-prob of a place without one, with token 0."""
_RESULTS: Final = 8192
"""Most results of samples that are kept of each tenant."""
_MOST: Final = 128
"""Most probable tokens of a place, at most."""


@dataclass(eq=False)
class _Waiting:
    tenant: str
    weights: str | None
    rows: int
    go: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Kept:
    """The results of samples, by tenant and name, until they have been fetched, and while there is room."""

    def __init__(self, nbytes: int, room: Room) -> None:
        """`nbytes`: of the results of one tenant, at most. The newest is kept whatever its size."""
        self._nbytes, self._room = nbytes, room
        self._tasks: dict[str, OrderedDict[str, asyncio.Task[Result]]] = {}
        """Those that leave next first."""
        self._sizes: dict[asyncio.Task[Result], int] = {}

    def get(self, tenant: str, name: str) -> asyncio.Task[Result] | None:
        """Return the task that draws a sample. None if there is none, or its result is gone."""
        tasks = self._tasks.get(tenant)
        return tasks.get(name) if tasks else None

    def begin(self, tenant: str, name: str, content: bytes, draw: Callable[[], Coroutine[None, None, Result]]) -> None:
        """Begin to draw, unless this is a repetition.

        Raises Conflict if a request with other content had the name, and Busy if there is no room.
        """
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        if (known := self.get(tenant, name)) is None:
            self._room.take(tenant, len(content))
            task = self._tasks.setdefault(tenant, OrderedDict())[name] = asyncio.create_task(draw(), name=digest)
            task.add_done_callback(lambda _: self._room.give(tenant, len(content)))
            task.add_done_callback(partial(self._drawn, tenant))
        elif known.get_name() != digest:
            raise Conflict(f"the sample {name} came before with other content: each number is one request")

    def sent(self, tenant: str, name: str) -> None:
        """Note that a result was sent. It is kept for a client that lost it, as long as nobody else needs its room."""
        if self.get(tenant, name) is not None:
            self._tasks[tenant].move_to_end(name, last=False)

    def _drawn(self, tenant: str, task: asyncio.Task[Result]) -> None:
        tasks = self._tasks[tenant]
        self._sizes[task] = 0 if task.cancelled() else nbytes_of(task.result())
        total = sum(self._sizes.get(each, 0) for each in tasks.values())
        for name, each in list(tasks.items()):
            if total <= self._nbytes and len(tasks) <= _RESULTS:
                return
            if each in self._sizes and each is not task:  # of one that has just ended, the size comes next
                total -= self._sizes.pop(each)
                del tasks[name]


class Desk:
    """Draws samples, of as many requests at once as the sampler has room for.

    Those who wait are let in by turns of their tenants. A sampler that has one set of weights at a time changes them
    while nothing is drawn: a request that needs others holds back all that come after it.
    """

    def __init__(self, models: Models, folder_of: Callable[[str, str], Path], most: int) -> None:
        """`folder_of`: the folder of a tenant's weights by their path. `most`: rows that are drawn at once."""
        self._models, self._folder_of, self._most = models, folder_of, most
        self._sampler = models.sampler
        self._batcher = RequestBatcher(models.sampler)
        self._turns = Turns()
        self._waiting: list[_Waiting] = []
        self._running: dict[_Waiting, int] = {}
        self._loaded: Version | None = None
        """The weights that an exclusive sampler has. None for the base model's."""
        self._is_loaded = False
        self._admitting = asyncio.Lock()
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def watch(self) -> None:
        """Wait until the sampler fails for good, and raise why."""
        await self._fault

    async def sample(self, tenant: str, weights: str | None, request: Sample, identity: str) -> Sampled:
        """Draw what a request asks for. `identity` decides random numbers, if the request has no seed."""
        try:
            return await self._sampled(tenant, weights, request, identity)
        except MeshrlError as error:
            if is_machine_fault(error) and not self._fault.done():
                self._fault.set_exception(error)
            raise

    async def _sampled(self, tenant: str, weights: str | None, request: Sample, identity: str) -> Sampled:
        sampling, limit, stops = self._sampling(request, identity)
        prompt = np.array(request.prompt.tokens, np.int32)
        if not len(prompt):
            raise DataError("the prompt is empty: send at least one token")
        if request.prompt_alt_tokens_k or request.record_stability_info:
            what = "prompt_alt_tokens_k" if request.prompt_alt_tokens_k else "record_stability_info"
            raise DataError(f"this server does not know {what}: leave it out")
        if max(request.topk_prompt_logprobs, request.topk_sample_logprobs) > _MOST:
            raise DataError(f"more than {_MOST} most probable tokens of a place: ask for fewer")
        waiting = _Waiting(tenant, weights, request.num_samples)
        await self._enter(waiting)
        name, served = "", len(prompt) + request.num_samples * min(limit, len(prompt) + _MOST)  # if it is cancelled
        try:
            name = "" if self._models.is_exclusive else await self._hold(tenant, weights)
            named = None if self._models.is_exclusive else name
            draw = self._batcher.draw
            answers = await asyncio.gather(
                *(draw(prompt, "", sampling, limit, stops, named) for _ in range(request.num_samples))
            )
            served = len(prompt) + sum(len(answer.drawn.tokens) for answer in answers)
            if not all(len(answer.drawn.tokens) for answer in answers):
                raise DataError(f"the prompt has {len(prompt)} tokens, and the model has no room for another")
            return await self._told(request, prompt, answers, named)
        finally:
            if name:
                self._models.release(name)
            del self._running[waiting]
            self._turns.charge(tenant, served)
            await asyncio.shield(self._admit())

    async def generate(self, tenant: str, request: Generate) -> Made:
        """Make a call of the sampler's `generate`, for a client of ours."""
        kind = BesideSampling if request.beside else JoinedSampling if request.joins else Sampling
        try:
            sampling = kind.model_validate(request.sampling)
        except ValueError as error:
            raise DataError(f"the sampling cannot have these fields: {error}") from error
        prompts = request.prompts.batch()
        waiting = _Waiting(tenant, request.path, len(prompts) * sampling.n)
        await self._enter(waiting)
        name, served = "", len(prompts)
        try:
            name = "" if self._models.is_exclusive else await self._hold(tenant, request.path)
            asked = _named(prompts, None if self._models.is_exclusive else name)
            rows = Batch.concat([chunk async for chunk in self._sampler.generate(asked, sampling)])
            rows = await (rows.drop(ADAPTER) if ADAPTER in rows else rows).load()
            served = max(1, len(rows.tokens.values)) if len(rows) else 1
            return Made(Packed.of(rows))
        except MeshrlError as error:
            if is_machine_fault(error) and not self._fault.done():
                self._fault.set_exception(error)
            raise
        finally:
            if name:
                self._models.release(name)
            del self._running[waiting]
            self._turns.charge(tenant, served)
            await asyncio.shield(self._admit())

    async def close(self) -> None:
        """Cancel what is being drawn."""
        await self._batcher.close()

    async def _hold(self, tenant: str, weights: str | None) -> str:
        return await self._models.hold(None if weights is None else self._folder_of(tenant, weights))

    async def _enter(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        await self._admit()
        try:
            await waiting.go
        except asyncio.CancelledError:
            self._running.pop(waiting, None)
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            await self._admit()
            raise

    async def _admit(self) -> None:
        """Let in all whose turn it is."""
        async with self._admitting:
            while self._waiting:
                tenant = self._turns.choose({each.tenant for each in self._waiting})
                first = next(each for each in self._waiting if each.tenant == tenant)
                rows = sum(self._running.values())
                try:
                    others, version = self._differs(first)
                except (DataError, OSError) as error:
                    self._waiting.remove(first)
                    if not first.go.done():
                        first.go.set_exception(error)
                    continue
                if self._running and (others or rows + first.rows > self._most):
                    return
                self._waiting.remove(first)
                if others:
                    try:
                        self._is_loaded = False
                        await self._hold(first.tenant, first.weights)
                        self._loaded, self._is_loaded = version, True
                    except Exception as error:  # noqa: BLE001 -- told to the one who asked
                        if not first.go.done():
                            first.go.set_exception(error)
                        continue
                if not first.go.done():
                    self._running[first] = first.rows
                    first.go.set_result(None)

    def _differs(self, waiting: _Waiting) -> tuple[bool, Version | None]:
        """Return whether a request needs other weights than an exclusive sampler has, and which those are now."""
        if not self._models.is_exclusive:
            return False, None
        weights = waiting.weights
        version = None if weights is None else version_of(self._folder_of(waiting.tenant, weights))
        return not (self._is_loaded and version == self._loaded), version

    def _sampling(self, request: Sample, identity: str) -> tuple[Sampling, int, Sequence[str]]:
        given = request.sampling_params
        stop: Sequence[str | int] = [given.stop] if isinstance(given.stop, str) else given.stop or []
        texts = [each for each in stop if isinstance(each, str)]
        ids = tuple(each for each in stop if not isinstance(each, str))
        digest = hashlib.blake2b(identity.encode(), digest_size=7).digest()
        seed = given.seed if given.seed is not None else int.from_bytes(digest)
        limit = given.max_tokens or 2**24
        sampling = Sampling(
            max_tokens=limit,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(0, given.top_k),
            stop_ids=ids,
            seed=seed,
        )
        return sampling, limit, texts

    async def _told(
        self, request: Sample, prompt: NDArray[np.int32], answers: Sequence[Answer], adapter: str | None
    ) -> Sampled:
        """Add what the request wants to know about the prompt's and the drawn tokens."""
        drawn = [answer.drawn for answer in answers]
        most = request.topk_sample_logprobs
        whole = [np.concatenate([prompt, each.tokens]) for each in drawn] if most else [prompt]
        top = max(most, request.topk_prompt_logprobs)
        scored: Batch | None = None
        if request.prompt_logprobs or top:
            tokens = Ragged.of(whole, np.int32)
            scored = await (await self._sampler.logprobs(_named(Batch.of(tokens=tokens), adapter), top)).load()
        sequences = [
            Drawn(
                np.asarray(each.tokens, np.int32).tobytes(),
                np.asarray(each.logprobs, np.float32).tobytes(),
                stopped=not each.truncated,
                topk=_top(scored, row, len(prompt), len(whole[row]), most) if scored and most else None,
            )
            for row, each in enumerate(drawn)
        ]
        last = request.prompt_logprobs_last_n
        first = 1 if last is None else max(1, len(prompt) - last)
        values: bytes | None = None
        if scored is not None and request.prompt_logprobs:
            known = np.array(scored.ragged("logprobs")[0][: len(prompt)], np.float32)
            known[:first] = np.nan
            values = known.tobytes()
        few = request.topk_prompt_logprobs
        prompt_top = _top(scored, 0, 0, len(prompt), few, first) if scored is not None and few else None
        targets, columns = await self._targets(prompt, request.target_prompt_logprobs, adapter)
        return Sampled(sequences, values, prompt_top, targets, columns)

    async def _targets(
        self, prompt: NDArray[np.int32], wanted: JsonTensor | None, adapter: str | None
    ) -> tuple[bytes | None, int]:
        """Return the log-probs of the tokens that a request wants to know at each place of the prompt."""
        if wanted is None:
            return None, 0
        targets = wanted.packed().array.astype(np.int64)
        if targets.ndim != 2 or len(targets) != len(prompt) - 1 or not targets.shape[1]:
            raise DataError(
                f"target_prompt_logprobs has the shape {list(targets.shape)} for a prompt of {len(prompt)} tokens: it "
                f"is [{len(prompt) - 1}, K]"
            )
        asked = targets.T.astype(np.int32)
        rows = [np.concatenate([prompt[:1], np.where(each < 0, prompt[1:], each)]) for each in asked]
        tokens = Ragged.of([prompt] * len(rows), np.int32)
        batch = _named(Batch.of(tokens=tokens, targets=Ragged.of(rows, np.int32)), adapter)
        scored = await (await self._sampler.logprobs(batch)).load("logprobs")
        found: Array = np.stack([np.asarray(row)[1:] for row in scored.ragged("logprobs")], 1)
        return np.where(targets < 0, 0, found).astype(np.float32).tobytes(), targets.shape[1]


def _named(batch: Batch, adapter: str | None) -> Batch:
    return batch if adapter is None else batch.assign(**{ADAPTER: [adapter] * len(batch)})


def _top(scored: Batch, row: int, start: int, end: int, k: int, first: int = 0) -> TopK:
    """Return the most probable tokens at these places of a row. Those before `first` have none."""
    ids = np.array(scored.ragged("top_tokens")[row][start:end, :k], np.int32)
    logprobs = np.array(scored.ragged("top_logprobs")[row][start:end, :k], np.float32)
    hidden = np.arange(start, end) < first
    ids[hidden], logprobs[hidden] = 0, _MASKED
    return TopK(ids.tobytes(), logprobs.tobytes(), k)
