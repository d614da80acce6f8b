"""Fake roles, which learn and keep the guarantees about columns, versions and order, and a fake run.

The only weight of a policy is a skill from 0 to 1, the probability that the sampler gives the right answer. An update
with any advantage other than zero raises it.
"""

import hashlib
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshrl.algo import Gae, Loss, check_predicts, check_sources, with_advantages
from meshrl.data import Batch, LossResult, Metrics, Ragged, Source, Weights
from meshrl.engines.local import LocalEngine
from meshrl.errors import BackendError, DataError, ModelError
from meshrl.mesh import Actor, Engine, Mesh, Resources
from meshrl.roles import (
    Critic,
    CriticConfig,
    ModelConfig,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    Reward,
    RewardModel,
    RewardModelConfig,
    RewardTrainingConfig,
    RoleConfig,
    SamplerConfig,
    Sampling,
    Stateful,
    Step,
    SteppingSampler,
)
from meshrl.run import BackgroundEvaluations, Run, RunConfig, Steps
from meshrl.tasks import RewardConfig, accepted
from meshrl.testing.scripted import END, cut_answer, reply

R = TypeVar("R")
S = TypeVar("S", bound=Stateful)

_SKILL = "skill"
_ONE_BY_ONE, _LOTS = 12, 4
"""Up to 12 rows each take a separate decode step. More rows come in 4 lots, which costs a laptop almost no time."""
_TOKENS = ("tokens", "loss_mask", "sampler_logprobs", "versions")


def count_rows(_config: ModelConfig, rows: Batch) -> list[int]:
    """Count one token per character."""
    texts = [rows.objects(name) for name in ("prompt", "completion", "messages") if name in rows]
    return [sum(len(str(text)) for text in row) for row in zip(*texts, strict=True)]


class State(msgspec.Struct, frozen=True):
    """The whole state of a role without a model, which checkpoints hold as JSON."""

    role: str
    updates: int
    skill: float | None = None
    """Of a fake policy."""


class _Learner:
    """Mixin for fakes that are trained. Their whole state is the number of their updates."""

    state_of: ClassVar[str]
    """Names the role in its checkpoints."""
    version: int = 0
    """Number of all updates, including those before a restore."""

    def __init__(self) -> None:
        self.updates: deque[Batch] = deque(maxlen=256)
        """The last batches that this rank was given."""

    def _stepped(self) -> None:
        self.version += 1

    def _state(self) -> State:
        return State(self.state_of, self.version)

    def _set_state(self, state: State) -> None:
        self.version = state.updates
        self.updates.clear()

    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        """Write `state.json`."""
        _write(folder, "state.json", msgspec.json.encode(self._state()))

    async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
        """Read `state.json`. Raises DataError if it belongs to another role."""
        state = _read_state(folder)
        if state.role != self.state_of:
            raise DataError(
                f"{folder} holds the state of a {state.role}, not of a {self.state_of}: restore each role from its own "
                "folder"
            )
        self._set_state(state)

    async def save(self, folder: str, adapter: str | None = None) -> None:
        """Write the number of updates as text."""
        _write(folder, "updates", str(self.version).encode())

    def _note(self, batch: Batch, loss: Loss) -> None:
        """Note the rows of an update. Raises DataError for a missing column of the loss."""
        for name in loss.columns:
            if name != "rows":
                batch[name]
        self.updates.append(batch)


class FakePolicy(_Learner, Policy):
    """A policy whose skill starts at `skill` and rises by `rate` per update."""

    state_of = "fake policy"

    def __init__(self, config: PolicyConfig, skill: float = 0.2, rate: float = 0.1) -> None:
        super().__init__()
        self.skill: float = skill
        self.rate = rate
        self.added: list[tuple[Batch, Loss]] = []
        """What was given to `forward_backward` since the last step."""

    def _state(self) -> State:
        return msgspec.structs.replace(super()._state(), skill=self.skill)

    def _set_state(self, state: State) -> None:
        super()._set_state(state)
        self.added.clear()
        self.skill = self.skill if state.skill is None else state.skill

    async def encode(self, batch: Batch) -> Batch:
        """Encode one token per character."""
        completions = [f"{completion}{END}" for completion in batch.objects("completion")]
        return _with_tokens(batch, cast("tuple[str, ...]", batch.objects("prompt")), completions)

    async def forward_backward(self, batch: Batch, loss: Loss) -> LossResult:
        """Take the rows, with log-probs and losses of zero.

        Raises DataError for a critic's loss, for a missing column or one from another source than it says, for a token
        or a log-prob that is newer than the policy, and for a loss that is normalised unlike one before it.
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
        for _, other in self.added[:1]:
            if (other.normalise, other.constant) != (loss.normalise, loss.constant):
                raise DataError(
                    f"{type(loss).__name__} has normalise = {loss.normalise!r} and the loss before it in the same step "
                    f"{other.normalise!r}: call `step` in between"
                )
        self._note(batch, loss)
        self.added.append((batch, loss))
        zeros = batch.only().assign(logprobs=_zeros(batch, Source.trainer(version)), losses=_zeros(batch))
        return LossResult(zeros, self._metrics([batch]))

    async def step(self, optimizer: Step | None = None, adapter: str | None = None) -> Metrics:
        """Learn if there is a signal. Raises DataError if there are no rows since the last step."""
        if not self.added:
            raise DataError("nothing to step on: call forward_backward first")
        if any("advantages" not in loss.columns or _has_signal(batch, "advantages") for batch, loss in self.added):
            self.skill = min(1.0, self.skill + self.rate)
        self._stepped()
        batches = [batch for batch, _ in self.added]
        self.added.clear()
        return self._metrics(batches)

    def _metrics(self, batches: Sequence[Batch]) -> Metrics:
        tokens = float(sum(batch.loss_mask.values.sum() for batch in batches))
        rows = float(sum(map(len, batches)))
        return Metrics.of(loss=(tokens * (1 - self.skill), tokens), tokens=(tokens, 1.0), rows=(rows, 1.0))

    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        """Write `state.json`. Raises DataError between `forward_backward` and `step`."""
        if self.added:
            raise DataError("gradients wait for a step, and a checkpoint does not hold them: call `step` before it")
        await super().checkpoint(folder, wait, adapter)

    async def logprobs(self, batch: Batch) -> Batch:
        """Return log-probs of zero."""
        return batch.assign(logprobs=_zeros(batch, Source.trainer(self.version)))

    async def weights(self, adapter: str | None = None) -> Weights:
        """Return the skill, with the number of updates as version."""
        return Weights(self.version, {_SKILL: np.array([self.skill])})

    async def save(self, folder: str, adapter: str | None = None) -> None:
        """Write the skill as JSON."""
        _write(folder, "skill.json", msgspec.json.encode(self.skill))


class FakeCritic(_Learner, Critic):
    """A critic whose values are 0. What follows from them is real."""

    state_of = "fake critic"

    def __init__(self, config: CriticConfig) -> None:
        super().__init__()

    async def advantages(self, batch: Batch, gae: Gae) -> Batch:
        """Return values of zero, and the advantages and returns that follow from the rewards."""
        return with_advantages(batch, _zeros(batch), gae)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn nothing, and return the metrics of `ValueLoss`.

        Raises DataError for a policy's loss, and for a missing column or one from another source than it says.
        """
        check_predicts(loss, "values")
        check_sources(batch, loss)
        self._note(batch, loss)
        self._stepped()
        returns = np.asarray(batch.ragged("returns").values, np.float64)
        tokens = float(np.sum(batch.loss_mask.values))
        squares = float(returns @ returns)
        means = {"value": 0.0, "return": float(returns.sum()), "return_squared": squares, "value_error": squares}
        return Metrics({name: (total, tokens) for name, total in {"loss": squares / 2, **means}.items()})


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
        """Yield a few rows at a time, shortest answers first: like a real sampler, rows finish out of order."""
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
            yield _with_completions(rows.select(waiting), [""] * len(waiting), version).assign(
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
        stops = (*sampling.stop, *sampling.stop_tokens)
        answers = [cut_answer(text, stops, limit) for text, limit in zip(texts, limits, strict=True)]
        return _with_completions(rows, [answer.drawn for answer in answers], self.weights.version).assign(
            completion=[answer.completion for answer in answers],
            truncated=np.array([answer.truncated for answer in answers], np.bool_),
        )

    def _completions(self, rows: Batch, numbers: list[int], sampling: Sampling) -> list[str]:
        prompts = list(map(str, rows.objects("prompt")))
        answers = [next(iter(accepted(answer)), "") for answer in rows.objects("answer")]
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
        return _rewarded(batch, [one in (accepted(other) or ("",)) for one, other in pairs])


class FakeRewardModel(_Learner, RewardModel):
    """A reward model whose scores grow by `rate` per update: positive for texts like `answer`, negative for others.

    Before its first update all scores are 0.
    """

    state_of = "fake reward model"

    def __init__(self, config: RewardTrainingConfig, rate: float = 0.1) -> None:
        super().__init__()
        self.rate = rate

    async def encode(self, batch: Batch) -> Batch:
        """Encode one token per character, and one at the end."""
        tokens: list[list[int]] = []
        masks: list[list[bool]] = []
        for prompt, steps in zip(_texts(batch, "prompt"), _steps(batch), strict=True):
            tokens.append([*map(ord, prompt + "".join(steps)), 0])
            ends = len(prompt) - 1 + np.cumsum([len(step) for step in steps])
            scored = {*ends[:-1].tolist(), len(tokens[-1]) - 1}
            masks.append([at in scored for at in range(len(tokens[-1]))])
        return batch.assign(tokens=Ragged.of(tokens, np.int32), loss_mask=Ragged.of(masks, np.bool_))

    async def score(self, batch: Batch) -> Batch:
        """Compare `completion` with `answer`."""
        pairs = zip(_texts(batch, "completion"), _texts(batch, "answer"), strict=True)
        return _rewarded(batch, [self._score(one == other) for one, other in pairs])

    async def token_scores(self, batch: Batch) -> Batch:
        """Compare the text up to the end of each step, or of the completion, with `answer`."""
        scores: list[float] = []
        for steps, answer in zip(_steps(batch), _texts(batch, "answer"), strict=True):
            begun = ["".join(steps[: at + 1]) for at in range(len(steps))]
            right = [answer.startswith(text) for text in begun[:-1]]
            scores += [self._score(each) for each in (*right, begun[-1] == answer)]
        mask = batch.loss_mask
        values = np.zeros(len(mask.values), np.float32)
        values[np.asarray(mask.values, np.bool_)] = scores
        return batch.assign(token_scores=Ragged(values, mask.offsets))

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Learn. Raises DataError for another kind of model's loss, or a missing column."""
        check_predicts(loss, "scores")
        self._note(batch, loss)
        self._stepped()
        count = float(np.sum(batch.loss_mask.values))
        return Metrics.of(loss=(count * np.exp(-self.rate * self.version), count), rows=(float(len(batch)), 1.0))

    def _score(self, right: bool) -> float:
        return self.rate * self.version * (1 if right else -1)


class FakeRun(Run):
    """A `Run` without files and progress line: `await algorithm(FakeRun(policy, sampler, reward), config)`.

    `spawn` returns the actor that implements the role, whatever backend the configuration names. Meshes of the run have
    no threads, so it works in virtual time.
    """

    def __init__(self, *actors: Actor, seed: int = 0, engine: Engine | None = None) -> None:
        self.config: RunConfig = RunConfig(seed=seed)
        self.engine: Engine | LocalEngine = engine or LocalEngine()
        self._folder: Path | None = None
        self.actors = actors
        self.recorded: list[dict[str, float]] = []
        """The numbers of each `record`."""
        self.told: dict[str, float | str] = {}
        """The values given to `summary`."""
        self.evaluated: list[dict[str, float]] = []
        """Results of evaluations, with the `step` after which they began."""
        self._evaluations = BackgroundEvaluations(
            lambda step, numbers: self.evaluated.append({"step": step, **numbers})
        )

    @property
    def folder(self) -> Path:
        """A new private folder, which is removed with the run."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="meshrl-fake-run-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    async def spawn(self, role: Callable[..., R], config: RoleConfig) -> R:
        """Return the first actor that is of this role. Raises BackendError if there is none."""
        for actor in self.actors:
            if isinstance(role, type) and isinstance(actor, role):
                return cast("R", actor)
        has = ", ".join(type(actor).__name__ for actor in self.actors) or "nothing"
        name = getattr(role, "__name__", str(role))
        raise BackendError(f"the script spawns a {name}, and this FakeRun was given {has}: give it one")

    async def keep(self, name: str, state: S) -> S:
        """Return the same object. Nothing is kept."""
        return state

    async def mesh(self, ranks: int, resources: Resources | None = None) -> Mesh:
        """Return ranks in the caller's own loop."""
        return await Mesh.reserve(self.engine, ranks, Resources(cpus=0))

    def steps(self, count: int) -> AsyncIterator[int]:
        """Iterate over the steps, 0 to count - 1."""
        return Steps(range(count), lambda step: self._between(count if step is None else step, last=step is None))

    async def _between(self, done: int, *, last: bool) -> None:
        """Begin due evaluations between two steps. Nothing is written."""
        await self._evaluations.turn(done)
        if last:
            await self._evaluations.settle()

    async def once(self, name: str, measure: Callable[[], Awaitable[Mapping[str, float]]]) -> Mapping[str, float]:
        """Return the measured numbers."""
        return await measure()

    async def record(self, metrics: Metrics, batch: Batch | None = None, **numbers: float) -> None:
        """Keep the numbers."""
        self.recorded.append({**metrics.means(), **numbers})

    async def keep_held_out(self, judged: Batch, done: int | None = None) -> None:
        """Write nothing."""

    def summary(self, **values: float | str) -> None:
        """Keep the values."""
        self.told |= values

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._evaluations.close()
        await self.engine.close()


def _rewarded(batch: Batch, rewards: Sequence[float]) -> Batch:
    return batch.assign(rewards=np.array(rewards, np.float32), reward_error=[None] * len(batch))


def _read_state(folder: str) -> State:
    return msgspec.json.decode(Path(folder, "state.json").read_bytes(), type=State)


def _write(folder: str, name: str, content: bytes) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, name).write_bytes(content)


def _with_tokens(batch: Batch, given: Sequence[str], learned: Sequence[str]) -> Batch:
    """Rows of one token per character: given tokens, then learned ones."""
    text = "".join(chain.from_iterable(zip(given, learned, strict=True)))
    lengths = np.stack([np.fromiter(map(len, texts), np.int64) for texts in (given, learned)], axis=1)
    offsets = np.concatenate([[0], np.cumsum(lengths.sum(1))])
    tokens = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)
    mask = np.repeat(np.tile([False, True], len(lengths)), lengths.ravel())
    return batch.assign(tokens=Ragged(tokens, offsets), loss_mask=Ragged(mask, offsets))


def _with_completions(rows: Batch, learned: Sequence[str], version: int) -> Batch:
    """Rows with these completions, after their previous tokens and observations, which are not learned."""
    given = cast("Sequence[str]", rows.objects("prompt"))
    goes_on = "observation" in rows and "tokens" in rows
    if goes_on:
        old = ["".join(map(chr, tokens.tolist())) for tokens in rows.tokens]
        given = [f"{text}{seen or ''}" for text, seen in zip(old, rows.objects("observation"), strict=True)]
    without_tokens = rows.drop(*(name for name in _TOKENS if name in rows))
    done = _with_tokens(without_tokens.assign(completion=[""] * len(rows)), given, learned)
    mask = done.loss_mask
    versions = Ragged(np.where(mask.values, version, -1).astype(np.int32), mask.offsets)
    if goes_on:
        pairs = zip(versions, rows.versions, strict=True)
        versions = Ragged.of([[*earlier, *own[len(earlier) :]] for own, earlier in pairs], np.int32)
    return done.assign(
        sampler_logprobs=_zeros(done, Source("sampler")),
        versions=versions,
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


def _zeros(batch: Batch, source: Source | None = None) -> Ragged:
    return Ragged(np.zeros(len(batch.tokens.values), np.float32), batch.tokens.offsets, source=source)


def _has_signal(batch: Batch, name: str) -> bool:
    column = batch[name]
    if not len(batch):  # a rank without rows learns like those with some
        return True
    return bool(np.any(column.values if isinstance(column, Ragged) else batch.row(name)))


def _texts(batch: Batch, name: str) -> tuple[str, ...]:
    return cast("tuple[str, ...]", batch.objects(name)) if len(batch) else ()


def _steps(batch: Batch) -> list[tuple[str, ...]]:
    """The steps of each row. A completion is one step."""
    if "steps" in batch:
        return [tuple(cast("tuple[str, ...]", steps)) for steps in (batch.objects("steps") if len(batch) else ())]
    return [(text,) for text in _texts(batch, "completion")]
