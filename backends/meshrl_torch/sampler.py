"""The sampler of the torch backend: a decode loop of our own over a Hugging Face model."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import numpy as np
import torch

from meshrl.actor import current_rank
from meshrl.data import Batch, Ragged
from meshrl.errors import DataError
from meshrl.roles import Sampler, SamplerConfig, Sampling
from meshrl.weights import Weights
from meshrl_torch.cache import Cache
from meshrl_torch.decode import Decoder, Finished, Request
from meshrl_torch.draw import Draw, key
from meshrl_torch.loading import load
from meshrl_torch.text import decode, encode_prompts, texts_of
from meshrl_torch.transfer import import_weights

YIELD_STEPS: Final = 8
"""Decode steps between two batches of finished rows: making a batch costs about as much as a step of a tiny model."""


class TorchSampler(Sampler):
    """Continuous batching on one rank.

    What is drawn hangs on the seeds, the weights' version, how many calls there were, and the row's number in the
    call: not on slots, nor on how a mesh divided the rows.
    """

    def __init__(self, config: SamplerConfig) -> None:
        torch.set_num_threads(current_rank().threads)
        self._config = config
        self._model = load(config)
        self._version = 0
        self._calls = 0
        self._caches: list[Cache] = []

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Finished rollouts, all that finished in some steps at a time; no rows give one batch of none."""
        repeated = prompts.repeat(sampling.n)
        request = self._request(repeated, sampling)
        draw = Draw(sampling, key(self._config.seed, sampling.seed, self._version, self._calls))
        self._calls += 1
        cache = self._caches.pop() if self._caches else Cache()
        decoder = Decoder(self._model, cache, request, draw, self._config.slots)
        steps = 0
        try:
            while decoder.busy:
                decoder.step(self._version)
                steps += 1
                if steps % YIELD_STEPS == 0 or not decoder.busy:
                    finished = decoder.take()
                    if finished is not None:
                        yield self._rollouts(repeated, finished, draw)
                await asyncio.sleep(0)  # calls that came in meanwhile, new weights for one
        finally:
            self._caches.append(cache)
        if not len(repeated):
            yield self._rollouts(repeated, _NONE, draw)

    async def load(self, weights: Weights, at: Batch | None = None) -> Batch:
        """Copy the weights in place; rows being decoded go on with them from their next token."""
        import_weights(self._model, weights)
        self._version = weights.version
        none = np.empty(0, np.int64)
        return Batch.of(rank=none, call=none, steps=none)

    async def abort(self) -> None:
        """End the running calls."""

    def _request(self, repeated: Batch, sampling: Sampling) -> Request:
        texts = texts_of(repeated, "prompt")
        different = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        ids = encode_prompts(self._model.tokenizer, list(different), self._model.chat)
        prompt = np.fromiter(map(different.__getitem__, texts), np.int64, len(texts))
        own = repeated.row("max_tokens") if "max_tokens" in repeated else sampling.max_tokens
        limits = np.broadcast_to(np.asarray(own, np.int64), len(repeated))
        if len(limits) and limits.min() < 1:
            row = int(limits.argmin())
            raise DataError(f"`max_tokens` of row {row} is {limits[row]}: a completion has at least 1 token")
        totals = np.fromiter(map(len, ids), np.int64, len(ids))[prompt] + limits
        if len(totals):
            row = int(totals.argmax())
            self._model.check_lengths(int(totals[row]), f"row {row} with {limits[row]} new tokens (max_tokens)")
        numbers = repeated.origins[-1] if repeated.origins else np.arange(len(repeated))
        if len(np.unique(numbers)) != len(numbers):  # rows taken twice since the split: equal draws are not wanted
            numbers = np.arange(len(repeated))
        ends = frozenset[int]() if sampling.ignore_eos else self._model.ends
        return Request(ids, prompt, limits, numbers, ends, sampling.stop)

    def _rollouts(self, repeated: Batch, finished: Finished, draw: Draw) -> Batch:
        offsets = np.append(0, np.cumsum(finished.lengths))
        starts, ends = offsets[:-1] + finished.prompts, offsets[1:]
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        texts = decode(self._model.tokenizer, [finished.tokens[start:end].tolist() for start, end in spans])
        place = np.arange(len(finished.tokens)) - np.repeat(offsets[:-1], finished.lengths)
        return repeated.select(finished.rows).assign(
            tokens=Ragged(finished.tokens, offsets),
            loss_mask=Ragged(place >= np.repeat(finished.prompts, finished.lengths), offsets),
            sampler_logprobs=Ragged(finished.logprobs, offsets),
            versions=Ragged(finished.versions, offsets),
            completion=[_cut(text, draw.sampling.stop) for text in texts],
            temperature=np.full(len(finished.rows), draw.temperature, np.float32),
            truncated=finished.truncated,
            oldest_version=np.full(len(finished.rows), self._version, np.int32),
            aborted=np.zeros(len(finished.rows), np.bool_),
        )


def _cut(text: str, stop: tuple[str, ...]) -> str:
    found = [place for place in (text.find(each) for each in stop) if place >= 0]
    return text[: min(found)] if found else text


_NONE: Final = Finished(
    rows=np.empty(0, np.int64),
    lengths=np.empty(0, np.int64),
    prompts=np.empty(0, np.int64),
    truncated=np.empty(0, np.bool_),
    tokens=np.empty(0, np.int32),
    logprobs=np.empty(0, np.float32),
    versions=np.empty(0, np.int32),
)
