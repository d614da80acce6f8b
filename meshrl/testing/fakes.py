"""Fake roles. They keep the roles' guarantees about columns, versions and order, and they learn.

The only weight is a skill from 0 to 1, the probability that the sampler gives the right answer. An update with any
advantage other than zero raises it.
"""

import hashlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshrl.algo import Loss, check_predicts, check_sources
from meshrl.data import Batch, Metrics, Ragged, Source, Weights
from meshrl.errors import DataError, ModelError
from meshrl.roles import (
    ModelConfig,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    Reward,
    RewardModelConfig,
    SamplerConfig,
    Sampling,
    SteppingSampler,
)
from meshrl.tasks import RewardConfig
from meshrl.testing.json_state import State, read_state
from meshrl.testing.scripted import END, reply, said

_SKILL = "skill"
_ONE_BY_ONE, _LOTS = 12, 4
"""Up to 12 rows each take a separate decode step. More rows come in 4 lots, which costs a laptop almost no time."""
_TOKENS = ("tokens", "loss_mask", "sampler_logprobs", "versions")


def count_prompts(_config: ModelConfig, prompts: Sequence[str]) -> list[int]:
    """Count one token per character."""
    return [len(prompt) for prompt in prompts]


class FakePolicy(Policy):
    """A policy whose skill starts at `skill` and rises by `rate` per update."""

    def __init__(self, config: PolicyConfig, skill: float = 0.2, rate: float = 0.1) -> None:
        self.skill: float = skill
        self.rate = rate
        self.updates: deque[Batch] = deque(maxlen=256)
        """The last batches that this rank was given."""
        self._made = 0
        """Number of all updates, including those before a restore."""

    @property
    def version(self) -> int:
        """Number of updates that made its skill."""
        return self._made

    async def encode(self, batch: Batch) -> Batch:
        """Encode one token per character."""
        return _encoded(batch, cast("tuple[str, ...]", batch.objects("completion")))

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn if there is a signal.

        Raises DataError for a critic's loss, for a missing column or one from another source than it says, and for a
        token or a log-prob that is newer than the policy.
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
        """Return log-probs of zero."""
        return batch.assign(logprobs=_zeros(batch, Source.trainer(self.version)))

    async def weights(self) -> Weights:
        """Return the skill, with the number of updates as version."""
        return Weights(self.version, {_SKILL: np.array([self.skill])})

    async def save(self, folder: str) -> None:
        """Write the skill as JSON."""
        _write(Path(folder), self.skill)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the skill and the number of updates."""
        State("fake policy", self.version, self.skill).write(folder)

    async def restore(self, folder: str) -> None:
        """Read the skill and the number of updates."""
        state = read_state(folder, "fake policy")
        self._made = state.updates
        self.updates.clear()
        self.skill = self.skill if state.skill is None else state.skill


class FakeReference(Reference):
    """A reference whose log-probs are zero."""

    def __init__(self, config: ReferenceConfig) -> None:
        self.weights: Weights | None = None
        """The loaded weights."""

    async def logprobs(self, batch: Batch) -> Batch:
        """Return log-probs of zero."""
        return batch.assign(reference_logprobs=_zeros(batch, Source("reference")))

    async def load(self, weights: Weights) -> None:
        """Load the skill. Raises ModelError for weights of another model."""
        if set(weights.tensors) != {_SKILL}:
            has = ", ".join(weights.tensors) or "nothing"
            raise ModelError(
                f"weights of version {weights.version} are of another model: a fake's have `{_SKILL}` alone, and these "
                f"have {has}"
            )
        self.weights = weights


class FakeSampler(SteppingSampler):
    """A sampler that gives the row's `answer` with the probability in its weights, else the prompt.

    It writes a token for each character and one for the end, unless a stop text or `max_tokens` comes first. A row is
    complete or not begun, so an aborted one has only its prompt's tokens. A conversation, which has no `answer`, is
    answered by `reply`, or by nothing.
    """

    def __init__(self, config: SamplerConfig) -> None:
        self.seed: int = config.seed
        self.weights: Weights = Weights(0, {_SKILL: np.array([0.0])})

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield a few rows at a time, shortest answers first: like a real sampler, rows finish out of order.

        Up to a dozen rows come one by one, more of them in four lots.
        """
        rows = _with_answers(prompts.repeat(sampling.n))
        ended = _ended(rows)
        if ended.any():
            yield rows.select(ended).assign(aborted=np.zeros(ended.sum(), np.bool_))
        numbers = rows.origins[-1] if rows.origins else np.arange(len(rows))  # of the call, however it was divided
        lengths = [-len(str(answer)) for answer in rows.objects("answer")] if len(rows) else []
        waiting = sorted(np.flatnonzero(~ended).tolist(), key=lengths.__getitem__)
        lot = 1 if len(waiting) <= _ONE_BY_ONE else -(-len(waiting) // _LOTS)
        async with self.generate_calls.begin(sampling.beside) as call:
            version = self.weights.version
            while waiting and await call.step():
                version = self.weights.version
                now = waiting[-lot:][::-1]
                del waiting[-lot:]
                if not waiting:
                    call.end()
                yield self._finished(rows.select(now), numbers[now].tolist(), sampling)
        if waiting:
            yield _described(rows.select(waiting), [""] * len(waiting), version).assign(
                aborted=np.ones(len(waiting), np.bool_)
            )

    async def load(self, weights: Weights) -> Batch:
        """Load the skill."""
        async with self.generate_calls.loading() as places:
            self.weights = weights
        return places

    def _finished(self, rows: Batch, numbers: list[int], sampling: Sampling) -> Batch:
        limits = rows.row("max_tokens").tolist() if "max_tokens" in rows else [sampling.max_tokens] * len(rows)
        texts = self._completions(rows, numbers, sampling)
        answers = [said(text, sampling.stop, limit) for text, limit in zip(texts, limits, strict=True)]
        return _described(rows, [answer.drawn for answer in answers], self.weights.version).assign(
            completion=[answer.completion for answer in answers],
            truncated=np.array([answer.truncated for answer in answers], np.bool_),
        )

    def _completions(self, rows: Batch, numbers: list[int], sampling: Sampling) -> list[str]:
        prompts, answers = (list(map(str, rows.objects(name))) for name in ("prompt", "answer"))
        skill = float(self.weights.tensors[_SKILL][0])
        if sampling.temperature == 0:
            return answers if skill >= 0.5 else prompts
        # Another turn draws differently.
        turns = rows.tokens.lengths.tolist() if "tokens" in rows and "observation" in rows else None
        key = repr((self.seed, sampling.seed, self.weights.version))[:-1]
        completions: list[str] = []
        for index, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
            own = f"{key}, {number}, {prompt!r}{f', {turns[index]}' if turns else ''})"
            draw = int.from_bytes(hashlib.blake2b(own.encode(), digest_size=4).digest()) / 2**32
            completions.append(answers[index] if draw < skill else prompt)
        return completions


class FakeReward(Reward):
    """Rewards 1 for the right answer, else 0."""

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


def _encoded(batch: Batch, completions: Sequence[str]) -> Batch:
    prompts = cast("tuple[str, ...]", batch.objects("prompt"))
    return _written(batch, prompts, [f"{completion}{END}" for completion in completions])


def _written(batch: Batch, given: Sequence[str], learned: Sequence[str]) -> Batch:
    """Rows of one token per character: given tokens, then learned ones."""
    text = "".join(chain.from_iterable(zip(given, learned, strict=True)))
    lengths = np.array([[len(before), len(after)] for before, after in zip(given, learned, strict=True)], np.int64)
    lengths = lengths.reshape(-1, 2)
    offsets = np.concatenate([[0], np.cumsum(lengths.sum(1))])
    tokens = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)
    mask = np.repeat(np.tile([False, True], len(lengths)), lengths.ravel())
    return batch.assign(tokens=Ragged(tokens, offsets), loss_mask=Ragged(mask, offsets))


def _described(rows: Batch, learned: Sequence[str], version: int) -> Batch:
    """Rows with these completions, after their previous tokens and observations, which are not learned."""
    goes_on = "observation" in rows and "tokens" in rows
    given = _seen(rows) if goes_on else cast("tuple[str, ...]", rows.objects("prompt"))
    done = _written(_anew(rows).assign(completion=[""] * len(rows)), given, learned)
    mask = done.loss_mask
    versions = Ragged(np.where(mask.values, version, -1).astype(np.int32), mask.offsets)
    return done.assign(
        sampler_logprobs=_zeros(done, Source("sampler")),
        versions=_kept(versions, rows.versions) if goes_on else versions,
        oldest_version=np.full(len(done), version, np.int32),
        temperature=np.ones(len(done), np.float32),
        truncated=np.zeros(len(done), np.bool_),
        aborted=np.zeros(len(done), np.bool_),
    )


def _with_answers(rows: Batch) -> Batch:
    """Fill in the right answers of conversations, which have none."""
    if "answer" in rows or "tokens" not in rows:
        return rows
    return rows.assign(answer=[reply("".join(map(chr, tokens.tolist()))) for tokens in rows.tokens])


def _ended(rows: Batch) -> NDArray[np.bool_]:
    """Rows that already have a completion, such as those of a sampler, bool[rows]."""
    if not all(name in rows for name in _TOKENS):
        return np.zeros(len(rows), np.bool_)
    return np.array([mask.any() for mask in rows.loss_mask], np.bool_)


def _seen(rows: Batch) -> list[str]:
    """The texts of the rows' tokens and observations."""
    old = ["".join(map(chr, tokens.tolist())) for tokens in rows.tokens]
    return [f"{text}{observation or ''}" for text, observation in zip(old, rows.objects("observation"), strict=True)]


def _kept(versions: Ragged, had: Ragged) -> Ragged:
    """Versions of the rows' tokens. `had`: those of the first tokens of each row."""
    return Ragged.of([[*old, *new[len(old) :]] for new, old in zip(versions, had, strict=True)], np.int32)


def _anew(rows: Batch) -> Batch:
    """The rows without their previous tokens."""
    return rows.drop(*(name for name in _TOKENS if name in rows))


def _zeros(batch: Batch, source: Source) -> Ragged:
    return Ragged(np.zeros(len(batch.tokens.values), np.float32), batch.tokens.offsets, source=source)


def _any(batch: Batch, name: str) -> bool:
    column = batch[name]
    if not len(batch):  # a rank without rows learns like those with some
        return True
    return bool(np.any(column.values if isinstance(column, Ragged) else batch.row(name)))
