"""Fake roles. They keep the roles' promises about columns, versions and order, and really learn.

The only weight is a skill from 0 to 1, the chance that the sampler gives the right answer. An update with
any advantage that is not zero raises it.
"""

import hashlib
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch, Metrics, Ragged, Source
from meshrl.errors import DataError, ModelError
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.rewards import RewardConfig
from meshrl.roles import (
    GenerateCalls,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    Reward,
    RewardModelConfig,
    Sampler,
    SamplerConfig,
    Sampling,
)
from meshrl.simulation import State, read_state
from meshrl.weights import Weights

_SKILL = "skill"
_TOKENS = ("tokens", "loss_mask", "sampler_logprobs", "versions")


class FakePolicy(Policy):
    """A policy that learns by `rate` an update, from a skill of `skill`."""

    def __init__(self, config: PolicyConfig, skill: float = 0.2, rate: float = 0.1) -> None:
        self.skill = skill
        self.rate = rate
        self.updates: deque[Batch] = deque(maxlen=256)
        """The batches that this rank was given last."""
        self._made = 0
        """How many it was given in all, with those that it was restored with."""

    @property
    def version(self) -> int:
        """How many updates made its skill."""
        return self._made

    async def encode(self, batch: Batch) -> Batch:
        """One token a character."""
        return _encoded(batch, cast("tuple[str, ...]", batch.objects("completion")))

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn if there is anything to learn from.

        DataError where the loss is a critic's, a column of it is missing or from elsewhere than it says, or a token or
        a log-prob is newer than the policy.
        """
        version = self.version
        newest = int(batch.row("oldest_version").max(initial=0)) if "oldest_version" in batch else 0
        if newest > version:
            raise DataError(
                f"`oldest_version` is {newest} in a row and this policy has made {version} updates: tokens of weights "
                "that do not exist yet"
            )
        check_predicts(loss, "logprobs")
        check_sources(batch, loss, version)
        for name in loss.columns:
            if name != "rows":
                batch[name]
        signal = [_any(batch, name) for name in loss.columns if name == "advantages"]
        if all(signal):
            self.skill = min(1.0, self.skill + self.rate)
        self.updates.append(batch)
        self._made += 1
        tokens = float(batch.loss_mask.values.sum())
        return Metrics.of(loss=(tokens * (1 - self.skill), tokens), tokens=(tokens, 1.0), rows=(float(len(batch)), 1.0))

    async def logprobs(self, batch: Batch) -> Batch:
        """Log-probs of zero."""
        return batch.assign(logprobs=_zeros(batch, Source.trainer(self.version)))

    async def weights(self) -> Weights:
        """The skill, at a version that counts the updates."""
        return Weights(self.version, {_SKILL: np.array([self.skill])})

    async def save(self, folder: str) -> None:
        """The skill as JSON."""
        _write(Path(folder), self.skill)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """The skill and the number of updates."""
        State("fake policy", self.version, self.skill).write(folder)

    async def restore(self, folder: str) -> None:
        """Take them."""
        state = read_state(folder, "fake policy")
        self._made = state.updates
        self.updates.clear()
        self.skill = self.skill if state.skill is None else state.skill


class FakeReference(Reference):
    """A reference whose log-probs are zero."""

    def __init__(self, config: ReferenceConfig) -> None:
        self.weights: Weights | None = None
        """Those that it took."""

    async def logprobs(self, batch: Batch) -> Batch:
        """Log-probs of zero."""
        return batch.assign(reference_logprobs=_zeros(batch, Source("reference")))

    async def load(self, weights: Weights) -> None:
        """Take the skill."""
        if set(weights.tensors) != {_SKILL}:
            has = ", ".join(weights.tensors) or "nothing"
            raise ModelError(
                f"weights of version {weights.version} are of another model: a fake's have `{_SKILL}` alone, and these "
                f"have {has}"
            )
        self.weights = weights


class FakeSampler(Sampler):
    """A sampler that gives the row's `answer` with the chance that its weights say, else the prompt.

    A row is a decode step: it is whole or not begun, so that an aborted one has its prompt's tokens alone.
    """

    def __init__(self, config: SamplerConfig) -> None:
        self.seed = config.seed
        self.weights = Weights(0, {_SKILL: np.array([0.0])})
        self._calls = GenerateCalls()

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """One row at a time, shortest answer first: as from a real sampler, rows finish out of order."""
        rows = prompts.repeat(sampling.n)
        ended = _ended(rows)
        if ended.any():
            yield rows.select(ended).assign(aborted=np.zeros(ended.sum(), np.bool_))
        answers = cast("tuple[str, ...]", rows.objects("answer")) if len(rows) else ()
        numbers = rows.origins[-1] if rows.origins else np.arange(len(rows))  # in the call, however it was divided
        waiting = sorted(np.flatnonzero(~ended).tolist(), key=lambda index: -len(answers[index]))
        async with self._calls.begin(sampling.beside) as call:
            version = self.weights.version
            while waiting and await call.step():
                version = self.weights.version
                index = waiting.pop()
                if not waiting:
                    call.end()
                yield self._finished(rows.select([index]), int(numbers[index]), answers[index], sampling)
        if waiting:
            yield _aborted(rows.select(waiting), version)

    async def load(self, weights: Weights) -> Batch:
        """Take the skill."""
        async with self._calls.loading() as places:
            self.weights = weights
        return places

    async def replay(self, record: Batch) -> None:
        """Let loads and aborts come at their places in the record."""
        self._calls.replay(record)

    async def abort(self) -> None:
        """No running call makes another step."""
        await self._calls.abort()

    def _finished(self, row: Batch, number: int, answer: str, sampling: Sampling) -> Batch:
        completion = self._complete(row, number, answer, sampling)[: sampling.max_tokens]
        had = row if "observation" in row and "tokens" in row else None
        done = _encoded(_anew(row).assign(completion=[completion]), [completion])
        if had is not None:
            done = _after(had, completion).assign(completion=[completion])
        done = _described(done, self.weights.version, aborted=False)
        return done if had is None else done.assign(versions=_kept(done.versions, had.versions))

    def _complete(self, row: Batch, number: int, answer: str, sampling: Sampling) -> str:
        key: tuple[object, ...] = (self.seed, sampling.seed, self.weights.version, number, row.objects("prompt")[0])
        if "tokens" in row and "observation" in row:
            key += (int(row.tokens.lengths[0]),)  # another turn is another draw
        draw = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest()) / 2**32
        skill = float(self.weights.tensors[_SKILL][0])
        right = skill >= 0.5 if sampling.temperature == 0 else draw < skill
        return answer if right else str(row.objects("prompt")[0])


class FakeReward(Reward):
    """1 for the right answer, else 0."""

    def __init__(self, config: RewardConfig | RewardModelConfig) -> None:
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


def _aborted(rows: Batch, version: int) -> Batch:
    prompts = cast("tuple[str, ...]", rows.objects("prompt"))
    tokens = Ragged.of([list(map(ord, prompt)) for prompt in prompts], np.int32)
    nothing = Ragged(np.zeros(len(tokens.values), np.bool_), tokens.offsets)
    rows = _anew(rows).assign(completion=[""] * len(rows), tokens=tokens, loss_mask=nothing)
    return _described(rows, version, aborted=True)


def _described(rows: Batch, version: int, aborted: bool) -> Batch:
    mask = rows.loss_mask
    return rows.assign(
        sampler_logprobs=_zeros(rows, Source("sampler")),
        versions=Ragged(np.where(mask.values, version, -1).astype(np.int32), mask.offsets),
        oldest_version=np.full(len(rows), version, np.int32),
        temperature=np.ones(len(rows), np.float32),
        truncated=np.zeros(len(rows), np.bool_),
        aborted=np.full(len(rows), aborted),
    )


def _ended(rows: Batch) -> NDArray[np.bool_]:
    """Which rows have a completion already, as those of a sampler have, bool[rows]."""
    if not all(name in rows for name in _TOKENS):
        return np.zeros(len(rows), np.bool_)
    return np.array([mask.any() for mask in rows.loss_mask], np.bool_)


def _after(row: Batch, completion: str) -> Batch:
    """A row with its observation and a completion after the tokens that it has, of which none is learnt."""
    had = [*row.tokens.values.tolist(), *map(ord, str(row.objects("observation")[0] or ""))]
    new = [*map(ord, completion), 0]
    mask = [False] * len(had) + [True] * len(new)
    return _anew(row).assign(tokens=Ragged.of([[*had, *new]], np.int32), loss_mask=Ragged.of([mask], np.bool_))


def _kept(versions: Ragged, had: Ragged) -> Ragged:
    """The versions of one row's tokens, the first of which are known."""
    return Ragged(np.concatenate([had.values, versions.values[len(had.values) :]]), versions.offsets)


def _anew(rows: Batch) -> Batch:
    """The rows without the tokens that they had."""
    return rows.drop(*(name for name in _TOKENS if name in rows))


def _zeros(batch: Batch, source: Source) -> Ragged:
    return Ragged(np.zeros(len(batch.tokens.values), np.float32), batch.tokens.offsets, source=source)


def _any(batch: Batch, name: str) -> bool:
    column = batch[name]
    if not len(batch):  # a rank without rows learns as those that have some
        return True
    return bool(np.any(column.values if isinstance(column, Ragged) else batch.row(name)))
