"""Evaluation of a sampler's completions while a run trains.

    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, reward.score)
    async for _ in run.steps(config.steps):
        ...

Results go to the run's `evaluations.jsonl`.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import ClassVar, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.overlap import Score, publish, rollout
from meshrl.roles import Policy, Sampler, Sampling
from meshrl.run.algorithm_config import EvaluationConfig
from meshrl.run.disk import write_whole
from meshrl.run.evaluation.estimates import pass_at_k, powers_of_2
from meshrl.run.periodic import Measurement
from meshrl.run.run import Run
from meshrl.tasks import RewardConfig, exact_match


class BesideSampling(Sampling):
    """How completions are sampled apart from training. Training samples the same tokens with and without them."""

    beside: ClassVar[bool] = True


@dataclass(frozen=True)
class Judged:
    """Rewards of the completions of some prompts."""

    greedy: NDArray[np.float32]
    """Rewards of the greedy completions, [prompts]."""
    sampled: NDArray[np.float32]
    """Rewards of the sampled completions, [prompts, n]."""
    truncated: float
    """Share of the sampled completions that were cut at the token limit."""
    reward_errors: int
    """Greedy and sampled completions whose reward function raised."""
    versions: tuple[int, int]
    """Versions of the weights that sampled the oldest and the newest token."""

    def numbers(self, threshold: float) -> Mapping[str, float]:
        """Return the numbers that a run records. A completion with a reward of `threshold` or more is right."""
        prompts, n = self.sampled.shape
        correct = (self.sampled >= threshold).sum(axis=1)
        return {
            "eval/greedy": float((self.greedy >= threshold).mean()),
            **{f"eval/pass@{k}": float(pass_at_k(correct, n, k).mean()) for k in powers_of_2(n)},
            "eval/reward": float(self.sampled.mean(dtype=np.float64)),
            "eval/truncated": self.truncated,
            "eval/reward_errors": self.reward_errors,
            "eval/prompts": prompts,
            "eval/version_oldest": self.versions[0],
            "eval/version_newest": self.versions[1],
        }


async def judge(sampler: Sampler, prompts: Batch, sampling: Sampling, score: Score | None = None) -> Judged:
    """Score one greedy completion and `sampling.n` sampled ones for each prompt.

    `score`: as for `rollouts`. Without it, the `rewards` of the rows count, which episodes have. Otherwise a completion
    is right if it equals the `answer`.
    """
    greedy = await _scored(await rollout(sampler, prompts, sampling.model_copy(update=_GREEDY)), score)
    sampled = await _scored(await rollout(sampler, prompts, sampling), score)
    # Only the rows sampled last have the newest token, and no token column of the greedy ones is loaded.
    newest = int((await sampled.load("versions")).versions.values.max(initial=0))
    oldest = [int(each.row("oldest_version").min()) for each in (greedy, sampled)]
    errors = [error for each in (greedy, sampled) if "reward_error" in each for error in each.objects("reward_error")]
    return Judged(
        greedy=greedy.rewards,
        sampled=sampled.rewards.reshape(len(prompts), sampling.n),
        truncated=float(np.asarray(sampled.row("truncated"), np.float64).mean()),
        reward_errors=sum(error is not None for error in errors),
        versions=(min(oldest), max(newest, *oldest)),
    )


def evaluate_during(
    run: Run,
    config: EvaluationConfig | None,
    sampler: Sampler,
    prompts: Batch,
    sampling: Sampling,
    score: Score | None = None,
    *,
    policy: Policy | None = None,
) -> None:
    """Evaluate the sampler on held-out prompts every `config.every` steps while the run trains. No-op without `config`.

    Call it before `run.steps`. The results of `judge` go to evaluations.jsonl as `eval/greedy`, `eval/pass@k` and so
    on. An error in the evaluation ends the run. It begins when a step's weights are published, and training continues.
    So later tokens may come from newer weights, unless `config.pause_training` is set. `eval/version_oldest` and
    `eval/version_newest` show the versions. With `ahead = 0` the run trains on exactly the same data as without it.

    `policy`: publish its weights before each evaluation, for scripts that do not publish after each step. Raises
    DataError if there are no prompts.
    """
    if config is None:
        return
    if not len(prompts):
        raise DataError(
            f"there are no prompts for an evaluation every {config.every} steps: hold some out (task.held_out), or "
            "leave [evaluation] out"
        )
    some = prompts.select(np.arange(min(len(prompts), config.rows or len(prompts))))
    drawn = BesideSampling(
        n=config.n,
        max_tokens=sampling.max_tokens,
        temperature=config.temperature or sampling.temperature or 1.0,  # n greedy samples would all be equal
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        seed=config.seed,
    )

    async def measure() -> Mapping[str, float]:
        return (await judge(sampler, some, drawn, score)).numbers(config.threshold)

    prepare = partial(publish, policy, sampler) if policy else None
    run.beside(Measurement(config.every, measure, config.pause_training, prepare))


_GREEDY: Mapping[str, float] = {"n": 1, "temperature": 0.0}
_EXACT: Final = "exact_match"


async def _scored(rollouts: Batch, score: Score | None) -> Batch:
    if score is not None:
        rollouts = await score(rollouts)
    elif "rewards" not in rollouts:
        rollouts = await _matched(rollouts)
    errors = ("reward_error",) if "reward_error" in rollouts else ()
    return await rollouts.load("rewards", "truncated", "oldest_version", *errors)


async def evaluate(
    sampler: Sampler, prompts: Batch, sampling: Sampling, score: Score | None = None
) -> dict[str, float]:
    """Measure the mean reward on held-out prompts: `greedy`, and `sampled` at the temperature, one completion each.

    The reward comes from `score`, else from the episodes of an environment, else from exact match. NaN if there are no
    prompts.
    """
    found = await _evaluated(sampler, prompts, sampling, score)
    return {"greedy": found.greedy, "sampled": found.sampled}


@dataclass(frozen=True)
class _Evaluated:
    """The results of a sampler on held-out prompts."""

    name: str
    """Name of the reward."""
    greedy: float
    """Mean reward of greedy completions."""
    sampled: float
    rows: Sequence[Mapping[str, object]]
    """One entry for each prompt: the rewards `greedy` and `sampled`, and the texts `prompt` and `completion`
    (greedy)."""

    def numbers(self) -> Mapping[str, float]:
        """Return the numbers for a summary."""
        return {self.name: self.greedy, f"{self.name}_sampled": self.sampled}


async def _evaluated(sampler: Sampler, prompts: Batch, sampling: Sampling, score: Score | None) -> _Evaluated:
    if not len(prompts):
        return _Evaluated("reward" if score else _EXACT, nan, nan, ())
    greedy = await rollout(sampler, prompts, sampling.model_copy(update=_GREEDY))
    sampled = await rollout(sampler, prompts, sampling.model_copy(update={"n": 1}))
    name = "reward" if score or "rewards" in greedy else _EXACT
    greedy, sampled = await _scored(greedy, score), await _scored(sampled, score)
    texts = [text for text in ("prompt", "completion") if text in greedy]
    greedy = await greedy.load("rewards", *texts)
    columns = {text: greedy.objects(text) for text in texts}
    columns |= {"greedy": greedy.rewards.tolist(), "sampled": sampled.rewards.tolist()}
    rows = [{key: column[index] for key, column in columns.items()} for index in range(len(prompts))]
    means = [each.rewards.mean(dtype=np.float64) for each in (greedy, sampled)]
    return _Evaluated(name, float(means[0]), float(means[1]), rows)


class Measured(Protocol):
    """The configuration of an algorithm that samples."""

    @property
    def evaluation(self) -> EvaluationConfig | None:
        """How to evaluate while the run trains."""
        ...

    @property
    def sampling(self) -> Sampling:
        """How the algorithm samples completions."""
        ...


@asynccontextmanager
async def held_out(
    run: Run,
    sampler: Sampler,
    prompts: Batch,
    config: Measured,
    score: Score | None = None,
    *,
    policy: Policy | None = None,
) -> AsyncGenerator[None]:
    """Evaluate the sampler on held-out prompts before and after the block, and during it if `config.evaluation` is set.

    The results of `evaluate` before and after the block go to summary.json, as `reward_before`, `reward_after` and
    `reward_sampled_...`. Their names begin with `exact_match_` if that is the reward, or if there is none. The rewards
    of each prompt after the block go to held_out.jsonl. In a resumed run, "before" means before the first step of the
    whole run. If the block raises, there is no evaluation after it. `score` and `policy`: as for `evaluate_during`.

        async with held_out(run, sampler, task.held_out, config, reward.score):
            async for step in run.steps(config.steps):
                ...
    """
    reward: object = getattr(config, "reward", None)
    is_exact = isinstance(reward, RewardConfig) and list(reward.parts.values()) == [_EXACT]
    judged = None if is_exact else score

    async def measure() -> _Evaluated:
        return await _evaluated(sampler, prompts, config.sampling, judged)

    async def first() -> Mapping[str, float]:
        return (await measure()).numbers()

    before = await run.once("held out", first)
    evaluate_during(run, config.evaluation, sampler, prompts, config.sampling, score, policy=policy)
    yield
    found = await measure()
    after = found.numbers()
    if found.rows:
        lines = msgspec.json.Encoder(enc_hook=str).encode_lines(found.rows)
        write_whole(run.folder / "held_out.jsonl", lines)
    run.summary(
        **{f"{name}_{when}": told[name] for name in after for when, told in (("before", before), ("after", after))}
    )


async def _matched(rollouts: Batch) -> Batch:
    """Add `rewards`: 1 if the completion equals the answer, else 0."""
    rollouts = await rollouts.load("completion", "answer")
    pairs = zip(rollouts.objects("completion"), rollouts.objects("answer"), strict=True)
    right = [exact_match("", str(text), {"answer": answer}) for text, answer in pairs]
    return rollouts.assign(rewards=np.array(right, np.float32))
