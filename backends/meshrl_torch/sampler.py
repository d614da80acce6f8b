"""The sampler of the torch backend: a decode loop of our own over a Hugging Face model."""

from collections.abc import AsyncIterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from meshrl.actor import current_rank
from meshrl.calls import Calls
from meshrl.data import Batch, Ragged
from meshrl.errors import DataError
from meshrl.ragged import Source
from meshrl.roles import Sampler, SamplerConfig, Sampling
from meshrl.sharding import Array
from meshrl.weights import Weights
from meshrl_hf.loading import load
from meshrl_hf.lora import adapt, adapters
from meshrl_hf.packing import runs
from meshrl_hf.text import decode, encode_prompts, texts_of
from meshrl_hf.transfer import import_weights
from meshrl_torch.cache import Cache
from meshrl_torch.decode import Decoder, Finished, Ints, Request
from meshrl_torch.draw import Draw, key

_PREFIX: Final = ("tokens", "loss_mask", "sampler_logprobs", "versions")
"""Columns of rows that go on after what they have."""
_NEWEST: Final = np.iinfo(np.int32).max

YIELD_STEPS: Final = 8
"""Decode steps between two batches of finished rows: making a batch costs about as much as a step of a tiny model."""


class TorchSampler(Sampler):
    """Continuous batching on one rank.

    What is drawn hangs on the seeds, the weights' version, how many calls began since they were loaded, and the row's
    number in the call: not on slots, nor on how a mesh divided the rows.
    """

    def __init__(self, config: SamplerConfig) -> None:
        torch.set_num_threads(current_rank().threads)
        self._config = config
        self._model = load(config)
        adapt(self._model, config.lora, config.seed)
        tensors = self._model.tensors()
        self._taken = adapters(tensors) if config.lora else tensors
        """What new weights are copied into."""
        self._version = 0
        self._calls = Calls()
        self._caches: list[Cache] = []

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Finished rollouts, all that finished in some steps at a time; no rows give one batch of none."""
        repeated = prompts.repeat(sampling.n)
        request, ended = self._request(repeated, sampling)
        if len(ended.rows):
            yield self._rollouts(repeated, ended, sampling, self._version)
        cache = self._caches.pop() if self._caches else Cache()
        try:
            async with self._calls.begin() as call:
                version = self._version
                draw = Draw(sampling, key(self._config.seed, sampling.seed, version, call.turn))
                decoder = Decoder(self._model, cache, request, draw, self._config.slots)
                while decoder.busy:
                    finished = decoder.take() if call.steps % YIELD_STEPS == 0 else None
                    if finished is not None:
                        yield self._rollouts(repeated, finished, sampling, version)
                    if not await call.step():
                        decoder.stop()
                        break
                    version = self._version
                    decoder.step(version)
        finally:
            self._caches.append(cache)
        finished = decoder.take()
        if finished is not None or not len(repeated):
            yield self._rollouts(repeated, finished or ended, sampling, version)

    async def load(self, weights: Weights) -> Batch:
        """Copy the weights in place; rows being decoded go on with them from their next token."""
        async with self._calls.loading() as places:
            import_weights(self._taken, weights)
            self._version = weights.version
        return places

    async def replay(self, record: Batch) -> None:
        """Let loads and aborts come at their places in the record."""
        self._calls.replay(record)

    async def abort(self) -> None:
        """No running call makes another step."""
        await self._calls.abort()

    def _request(self, rows: Batch, sampling: Sampling) -> tuple[Request, Finished]:
        """What is to be decoded, and the rows that have ended already."""
        continued = all(name in rows for name in _PREFIX)
        prefixes, prefix, starts = _prefixes(rows) if continued else self._prompts(rows)
        lengths = np.fromiter(map(len, prefixes), np.int64, len(prefixes))[prefix]
        own = rows.row("max_tokens") if "max_tokens" in rows else sampling.max_tokens
        limits = np.broadcast_to(np.asarray(own, np.int64), len(rows))
        if len(limits) and limits.min() < 1:
            row = int(limits.argmin())
            raise DataError(f"`max_tokens` of row {row} is {limits[row]}: a completion has at least 1 token")
        totals = np.maximum(starts + limits, lengths)
        if len(totals):
            row = int(totals.argmax())
            self._model.check_lengths(int(totals[row]), f"row {row} with {limits[row]} new tokens (max_tokens)")
        numbers = rows.origins[-1] if rows.origins else np.arange(len(rows))
        if len(np.unique(numbers)) != len(numbers):  # rows taken twice since the split: equal draws are not wanted
            numbers = np.arange(len(rows))
        ends = frozenset[int]() if sampling.ignore_eos else self._model.ends
        request = Request(prefixes, prefix, np.arange(len(rows)), starts, limits, numbers, ends, sampling.stop)
        if not continued or not len(rows):
            return request, _NONE
        stopped = self._stopped(rows, request)
        done = stopped | (lengths - starts >= limits)
        return request.select(~done), _ended(rows, np.flatnonzero(done), starts, ~stopped)

    def _prompts(self, rows: Batch) -> tuple[list[list[int]], Ints, Ints]:
        """The different prompts, which of them each row has, and its length."""
        texts = texts_of(rows, "prompt")
        different = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        ids = encode_prompts(self._model.tokenizer, list(different), self._model.chat)
        prompt = np.fromiter(map(different.__getitem__, texts), np.int64, len(texts))
        return ids, prompt, np.fromiter(map(len, ids), np.int64, len(ids))[prompt]

    def _stopped(self, rows: Batch, request: Request) -> NDArray[np.bool_]:
        """Whether each row's completion has an end already, bool[rows]."""
        values, offsets = rows.tokens.values, rows.tokens.offsets
        begun = rows.tokens.lengths > request.starts
        stopped = begun & np.isin(values[offsets[1:] - 1], sorted(request.ends))
        if request.stop:
            texts = decode(self._model.tokenizer, _completions(values, offsets, request.starts))
            stopped |= np.array([any(stop in text for stop in request.stop) for text in texts], np.bool_)
        return stopped

    def _rollouts(self, repeated: Batch, finished: Finished, sampling: Sampling, version: int) -> Batch:
        """Rows as they are told; `version` is that of a row which has no token of its own yet."""
        rows = repeated.select(finished.rows)
        offsets = np.append(0, np.cumsum(finished.lengths))
        place = np.arange(len(finished.tokens)) - np.repeat(offsets[:-1], finished.lengths)
        new = place >= np.repeat(finished.prompts, finished.lengths)
        if all(name in rows for name in _PREFIX):
            had = runs(offsets[:-1], rows.tokens.lengths)
            finished.logprobs[had] = rows.sampler_logprobs.values
            finished.versions[had] = rows.versions.values
        oldest = np.full(len(rows), version, np.int32)
        begun = finished.lengths > finished.prompts
        oldest[begun] = np.minimum.reduceat(np.where(new, finished.versions, _NEWEST), offsets[:-1])[begun]
        texts = decode(self._model.tokenizer, _completions(finished.tokens, offsets, finished.prompts))
        return rows.assign(
            tokens=Ragged(finished.tokens, offsets),
            loss_mask=Ragged(new, offsets),
            sampler_logprobs=Ragged(finished.logprobs, offsets, source=Source("sampler")),
            versions=Ragged(finished.versions, offsets),
            oldest_version=oldest,
            completion=[_cut(text, sampling.stop) for text in texts],
            temperature=np.full(len(rows), sampling.temperature or 1.0, np.float32),
            truncated=finished.truncated,
            aborted=finished.aborted,
        )


def _prefixes(rows: Batch) -> tuple[list[list[int]], Ints, Ints]:
    """The different token sequences that rows go on after, which of them each row has, and where completions start."""
    empty = np.flatnonzero(rows.tokens.lengths == 0)
    if len(empty):
        raise DataError(
            f"row {empty[0]} cannot be continued: its `tokens` are none; give its prompt's tokens, or drop the columns "
            f"{', '.join(_PREFIX)} to start all rows from their prompts"
        )
    different: dict[bytes, int] = {}
    tokens = [row.astype(np.int32) for row in rows.tokens]
    prefix = np.fromiter((different.setdefault(row.tobytes(), len(different)) for row in tokens), np.int64, len(rows))
    prefixes = [np.frombuffer(each, np.int32).tolist() for each in different]
    starts = [int(mask.argmax()) if mask.any() else len(mask) for mask in rows.loss_mask]
    return prefixes, prefix, np.array(starts, np.int64)


def _ended(rows: Batch, which: Ints, starts: Ints, truncated: NDArray[np.bool_]) -> Finished:
    """These rows, as they are."""
    some = rows.select(which)
    return Finished(
        rows=which,
        lengths=some.tokens.lengths,
        prompts=starts[which],
        truncated=truncated[which],
        aborted=np.zeros(len(which), np.bool_),
        tokens=some.tokens.values.astype(np.int32),
        logprobs=some.sampler_logprobs.values.astype(np.float32),
        versions=some.versions.values.astype(np.int32),
    )


def _completions(tokens: Array, offsets: Ints, starts: Ints) -> list[list[int]]:
    spans = zip((offsets[:-1] + starts).tolist(), offsets[1:].tolist(), strict=True)
    return [tokens[start:end].tolist() for start, end in spans]


def _cut(text: str, stop: tuple[str, ...]) -> str:
    found = [place for place in (text.find(each) for each in stop) if place >= 0]
    return text[: min(found)] if found else text


_NONE: Final = Finished(
    rows=np.empty(0, np.int64),
    lengths=np.empty(0, np.int64),
    prompts=np.empty(0, np.int64),
    truncated=np.empty(0, np.bool_),
    aborted=np.empty(0, np.bool_),
    tokens=np.empty(0, np.int32),
    logprobs=np.empty(0, np.float32),
    versions=np.empty(0, np.int32),
)
