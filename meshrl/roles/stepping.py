"""Samplers that decode step by step on their own rank, and the columns of what they drew."""

from abc import ABC
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshrl.data import Batch, Ragged, Source
from meshrl.roles.base import Sampler
from meshrl.roles.generate_calls import GenerateCalls
from meshrl.roles.sampling import Sampling


class SteppingSampler(Sampler, ABC):
    """A sampler that decodes on its own rank, step by step.

    A backend adds `generate` and `load`. The first makes its steps in a block, and the second takes weights in one:

        async with self.generate_calls.begin(sampling.beside) as call:
            while rows_are_left and await call.step():
                ...  # one decode step, without a pause

        async with self.generate_calls.loading() as places:
            ...  # take the weights, without a pause
        return places
    """

    @cached_property
    def generate_calls(self) -> GenerateCalls:
        """The calls of `generate` on this rank, and the places where loads and aborts interrupted them."""
        return GenerateCalls()

    async def replay(self, record: Batch) -> None:
        """Let loads and aborts come at their places in the record."""
        self.generate_calls.replay(record)

    async def abort(self) -> None:
        """No running call makes another step."""
        await self.generate_calls.abort()


@dataclass(frozen=True)
class Completion:
    """What a sampler drew for a row."""

    text: str
    """The completion."""
    prompt: Sequence[int]
    """The tokens that were given."""
    tokens: Sequence[int] = ()
    """The tokens that were drawn."""
    logprobs: Sequence[float] = ()
    """The log-prob of each token that was drawn."""
    truncated: bool = False
    """Whether it was cut off by `max_tokens`."""
    aborted: bool = False
    """Whether it was ended by an abort, before it was finished."""


def completed(rows: Batch, drawn: Iterable[Completion], version: int, sampling: Sampling) -> Batch:
    """Add the columns of `Sampler.generate` to rows that were drawn with the weights of one version."""
    drawn = list(drawn)
    given = [len(row.prompt) for row in drawn]
    taken = list(zip(drawn, given, strict=True))
    return rows.assign(
        completion=[row.text for row in drawn],
        tokens=Ragged.of([[*row.prompt, *row.tokens] for row in drawn], np.int32),
        loss_mask=Ragged.of([[False] * before + [True] * len(row.tokens) for row, before in taken], np.bool_),
        sampler_logprobs=Ragged.of(
            [[0.0] * before + [*row.logprobs] for row, before in taken], np.float32, source=Source("sampler")
        ),
        versions=Ragged.of([[-1] * before + [version] * len(row.tokens) for row, before in taken], np.int32),
        oldest_version=np.full(len(rows), version, np.int32),
        temperature=np.full(len(rows), sampling.temperature or 1.0, np.float32),
        truncated=np.array([row.truncated for row in drawn], np.bool_),
        aborted=np.array([row.aborted for row in drawn], np.bool_),
    )
