"""How good a sampler's completions are, measured during a run.

    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, reward.score)
    async for _ in run.steps(config.steps):
        ...

What is found goes to the run's `evaluations.jsonl`.
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
from meshrl.evaluation.estimates import pass_at_k, powers_of_2
from meshrl.rewards import RewardConfig, exact_match
from meshrl.roles import Policy, Sampler, Sampling
from meshrl.rollout import Score, publish, rollout
from meshrl.run import EvaluationConfig, Measurement, Run, write_whole


class BesideSampling(Sampling):
    """How completions are drawn that are no part of training: what training draws is the same with and without."""

    beside: ClassVar[bool] = True


@dataclass(frozen=True)
class Judged:
    """The completions of some prompts as a reward sees them."""

    greedy: NDArray[np.float32]
    """Rewards of a greedy completion each, [prompts]."""
    sampled: NDArray[np.float32]
    """Rewards of sampled ones, [prompts, n]."""
    truncated: float
    """The share of the sampled ones that were cut at the most tokens."""
    reward_errors: int
    """Of both."""
    versions: tuple[int, int]
    """Of the weights that drew the oldest and the newest token."""

    def numbers(self, at_least: float) -> Mapping[str, float]:
        """As a run records them; a completion is right from the reward `at_least` on."""
        prompts, n = self.sampled.shape
        correct = (self.sampled >= at_least).sum(axis=1)
        return {
            "eval/greedy": float((self.greedy >= at_least).mean()),
            **{f"eval/pass@{k}": float(pass_at_k(correct, n, k).mean()) for k in powers_of_2(n)},
            "eval/reward": float(self.sampled.mean(dtype=np.float64)),
            "eval/truncated": self.truncated,
            "eval/reward_errors": self.reward_errors,
            "eval/prompts": prompts,
            "eval/version_oldest": self.versions[0],
            "eval/version_newest": self.versions[1],
        }


async def judge(sampler: Sampler, prompts: Batch, sampling: Sampling, score: Score | None = None) -> Judged:
    """One greedy completion a prompt, and `sampling.n` sampled ones.

    `score`: as of a stream of rollouts. Without it the rows' own `rewards` count, which episodes have, else whether the
    completion is the `answer`.
    """
    greedy = await _scored(await rollout(sampler, prompts, sampling.model_copy(update=_GREEDY)), score)
    sampled = await _scored(await rollout(sampler, prompts, sampling), score)
    # Only the rows drawn last have the newest token, and of the greedy ones no token column is brought here.
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
    """Measure the sampler on held-out prompts every so many steps of the run, beside them; nothing without `config`.

    To be called before `run.steps`. What `judge` finds goes to evaluations.jsonl, as `eval/greedy`, `eval/pass@k`, ...;
    an error in it ends the run. It begins when the weights of a step are published and training goes on meanwhile, so
    that later tokens may be of newer weights, unless `config.wait`: `eval/version_oldest` and `_newest` tell. What is
    trained on is, to the bit, the same with and without it where `ahead` is 0.

    `policy`: its weights are published before, in a script that does not publish them itself after each step.
    DataError where there are no prompts.
    """
    if config is None:
        return
    if not len(prompts):
        raise DataError(
            f"there are no prompts to evaluate by every {config.every} steps: hold some out (task.held_out), or leave "
            "[evaluation] out"
        )
    some = prompts.select(np.arange(min(len(prompts), config.rows or len(prompts))))
    drawn = BesideSampling(
        n=config.n,
        max_tokens=sampling.max_tokens,
        temperature=config.temperature or sampling.temperature or 1.0,  # a greedy run's would draw n times the same
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        seed=config.seed,
    )

    async def measure() -> Mapping[str, float]:
        return (await judge(sampler, some, drawn, score)).numbers(config.at_least)

    prepare = partial(publish, policy, sampler) if policy else None
    run.beside(Measurement(config.every, measure, config.wait, prepare))


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
    """The mean reward on held-out prompts, one completion each: `greedy`, and `sampled` at the temperature.

    The reward is what `score` gives, else that of the episodes of an environment, else exact match. NaN where there are
    no prompts.
    """
    found = await _evaluated(sampler, prompts, sampling, score)
    return {"greedy": found.greedy, "sampled": found.sampled}


@dataclass(frozen=True)
class _Evaluated:
    """What a sampler makes of held-out prompts."""

    name: str
    """What the reward is called."""
    greedy: float
    """Its mean on greedy completions."""
    sampled: float
    rows: Sequence[Mapping[str, object]]
    """A prompt each: `greedy` and `sampled` are its rewards, `prompt` and `completion` the texts, the greedy one's."""

    def numbers(self) -> Mapping[str, float]:
        """As a summary has them."""
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
        """What is measured beside the steps."""
        ...

    @property
    def sampling(self) -> Sampling:
        """How the algorithm draws completions."""
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
    """Measure the sampler on held-out prompts: before the block, beside the steps in it, and after it.

    What `evaluate` finds before and after goes to summary.json as `reward_before`, `reward_after`, and
    `reward_sampled_...`; as `exact_match_...` where the reward is that, or there is none. What each prompt got after it
    is in held_out.jsonl. In a run that goes on, before means before its first step. `evaluate_during` measures beside
    the steps, where `config.evaluation` says so. A block that raises is not measured after. `score` and `policy`: as of
    `evaluate_during`.

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
    """With `rewards`: whether the completion is the answer."""
    rollouts = await rollouts.load("completion", "answer")
    pairs = zip(rollouts.objects("completion"), rollouts.objects("answer"), strict=True)
    right = [exact_match("", str(text), {"answer": answer}) for text, answer in pairs]
    return rollouts.assign(rewards=np.array(right, np.float32))
