"""Fake roles. They keep the roles' promises about columns, versions and order, and really learn.

The only weight is a skill from 0 to 1, the chance that the sampler gives the right answer. An update with
any advantage that is not zero raises it.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from meshrl.data import Batch
from meshrl.losses import Loss
from meshrl.metrics import Metrics
from meshrl.ragged import Ragged
from meshrl.rewards import RewardConfig
from meshrl.roles import (
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    Reward,
    Sampler,
    SamplerConfig,
    Sampling,
)
from meshrl.weights import Weights

_SKILL = "skill"


class FakePolicy(Policy):
    """A policy that learns by `rate` an update, from a skill of `skill`."""

    def __init__(self, config: PolicyConfig, skill: float = 0.2, rate: float = 0.1) -> None:
        self.skill = skill
        self.rate = rate
        self.updates: list[Batch] = []
        """Every batch that this rank was given."""

    async def encode(self, batch: Batch) -> Batch:
        """One token a character."""
        return _encoded(batch, cast("tuple[str, ...]", batch.objects("completion")))

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn if there is anything to learn from. Raises `DataError` where a column of the loss is missing."""
        signal = [_any(batch, name) for name in loss.columns if name == "advantages"]
        if all(signal):
            self.skill = min(1.0, self.skill + self.rate)
        for name in loss.columns:
            batch[name]
        self.updates.append(batch)
        tokens = float(batch.loss_mask.values.sum())
        return Metrics.of(loss=(tokens * (1 - self.skill), tokens), tokens=(tokens, 1.0), rows=(float(len(batch)), 1.0))

    async def logprobs(self, batch: Batch) -> Batch:
        """Log-probs of zero."""
        return batch.assign(logprobs=_zeros(batch))

    async def weights(self) -> Weights:
        """The skill, at a version that counts the updates."""
        return Weights(len(self.updates), {_SKILL: np.array([self.skill])})

    async def save(self, folder: str) -> None:
        """The skill as JSON."""
        _write(Path(folder), self.skill)


class FakeReference(Reference):
    """A reference whose log-probs are zero."""

    def __init__(self, config: ReferenceConfig) -> None:
        pass

    async def logprobs(self, batch: Batch) -> Batch:
        """Log-probs of zero."""
        return batch.assign(reference_logprobs=_zeros(batch))


class FakeSampler(Sampler):
    """A sampler that gives the row's `answer` with the chance that its weights say, else the prompt."""

    def __init__(self, config: SamplerConfig) -> None:
        self.seed = config.seed
        self.weights = Weights(0, {_SKILL: np.array([0.0])})

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """One row at a time, shortest answer first: as from a real sampler, rows finish out of order."""
        rows = prompts.repeat(sampling.n)
        answers = cast("tuple[str, ...]", rows.objects("answer"))
        for index in sorted(range(len(rows)), key=lambda index: len(answers[index])):
            row = rows.select([index])
            completion = self._complete(row, index, answers[index], sampling)[: sampling.max_tokens]
            row = _encoded(row.assign(completion=[completion]), [completion])
            mask = row.loss_mask
            yield row.assign(
                sampler_logprobs=_zeros(row),
                versions=Ragged(np.where(mask.values, self.weights.version, -1).astype(np.int32), mask.offsets),
                temperature=np.ones(1, np.float32),
                truncated=np.zeros(1, bool),
                oldest_version=np.full(1, self.weights.version, np.int32),
                aborted=np.zeros(1, bool),
            )
            await asyncio.sleep(0)

    async def load(self, weights: Weights, at: Batch | None = None) -> Batch:
        """Take the skill."""
        self.weights = weights
        none = np.empty(0, np.int64)
        return Batch.of(rank=none, call=none, steps=none)

    async def abort(self) -> None:
        """End the running calls."""

    def _complete(self, row: Batch, index: int, answer: str, sampling: Sampling) -> str:
        key = (self.seed, sampling.seed, self.weights.version, index, row.objects("prompt")[0])
        draw = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest()) / 2**32
        skill = float(self.weights.tensors[_SKILL][0])
        right = skill >= 0.5 if sampling.temperature == 0 else draw < skill
        return answer if right else str(row.objects("prompt")[0])


class FakeReward(Reward):
    """1 for the right answer, else 0."""

    def __init__(self, config: RewardConfig) -> None:
        pass

    async def score(self, batch: Batch) -> Batch:
        """Compare `completion` with `answer`."""
        pairs = zip(batch.objects("completion"), batch.objects("answer"), strict=True)
        rewards = np.array([one == other for one, other in pairs], np.float32)
        return batch.assign(rewards=rewards, reward_error=[None] * len(batch))


def _write(folder: Path, skill: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "skill.json").write_bytes(msgspec.json.encode(skill))


def _encoded(batch: Batch, completions: tuple[str, ...] | list[str]) -> Batch:
    prompts = cast("tuple[str, ...]", batch.objects("prompt"))
    texts = list(zip(prompts, completions, strict=True))
    tokens = [[*map(ord, prompt + completion), 0] for prompt, completion in texts]
    masks = [[False] * len(prompt) + [True] * (len(completion) + 1) for prompt, completion in texts]
    return batch.assign(tokens=Ragged.of(tokens, np.int32), loss_mask=Ragged.of(masks, np.bool_))


def _zeros(batch: Batch) -> Ragged:
    return Ragged(np.zeros(len(batch.tokens.values), np.float32), batch.tokens.offsets)


def _any(batch: Batch, name: str) -> bool:
    column = batch[name]
    return bool(np.any(column.values if isinstance(column, Ragged) else batch.row(name)))
