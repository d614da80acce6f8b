"""Evaluation of a model: exact match and pass@k on held-out prompts, during training and after it."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from math import nan
from pathlib import Path
from typing import ClassVar, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, field_validator

from meshrl.config import Config, Table, load_toml, validate
from meshrl.data import IMAGES, Batch, Images, known_mean, prompt_text, why_unknown
from meshrl.engines.local import LocalEngine
from meshrl.errors import ConfigError, DataError, did_you_mean
from meshrl.mesh import Mesh
from meshrl.observe import table_of
from meshrl.overlap import Score, publish, rollout
from meshrl.roles import (
    MOST_COMPLETIONS,
    Policy,
    PolicyConfig,
    Reward,
    RewardModelConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    implementation,
)
from meshrl.run.artifacts import newest_model, read_policy
from meshrl.run.background_eval import Measurement
from meshrl.run.config import EvaluationConfig
from meshrl.run.folder import write_whole
from meshrl.run.jobs import find_config, root_of, shipped_configs
from meshrl.run.run import Run
from meshrl.run.samples import thumbnails
from meshrl.tasks import RewardConfig, Task, TaskConfig, exact_match, harness

_Z: Final = 1.959963984540054
"""The 97.5 percent quantile of a standard normal distribution: 95 percent are within plus and minus this."""
_RESAMPLES: Final = 2000
_GREEDY: Final[Mapping[str, float]] = {"n": 1, "temperature": 0.0}
_EXACT: Final = "exact_match"


class Estimate(msgspec.Struct, frozen=True):
    """A measured number and its 95 percent confidence interval."""

    value: float
    low: float
    high: float


def powers_of_2(n: int) -> list[int]:
    """Return the powers of 2 up to n, and n: the k of pass@k."""
    return sorted({*(1 << power for power in range(n.bit_length())), n})


def pass_at_k(correct: ArrayLike, n: int, k: int) -> NDArray[np.float64]:
    """Estimate the chance that one of k completions of a prompt is right, float64[prompts].

    `correct`: int[prompts], the number of right completions among the n of each prompt. This is the unbiased estimator
    `1 - C(n - c, k) / C(n, k)` of Chen et al. 2021 (arXiv:2107.03374), equation 1, as a product without large numbers.
    DataError unless 1 <= k <= n and each count is from 0 to n.
    """
    counts = np.asarray(correct, np.int64)
    if not 1 <= k <= n:
        raise DataError(f"pass@{k} of {n} completions for each prompt: k must be from 1 to {n}; draw more, or lower k")
    if counts.size and (counts.min() < 0 or counts.max() > n):
        raise DataError(f"pass@{k}: counts from {counts.min()} to {counts.max()} of {n} completions: from 0 to {n}")
    number = np.arange(1, n + 1, dtype=np.float64)
    factors = np.maximum(1.0 - k / number, 0.0)
    # The chance that none is right is the product of 1 - k / i over i from n - c + 1 to n.
    tails = np.concatenate([[1.0], np.cumprod(factors[::-1])])
    return 1.0 - tails[counts]


def wilson(right: int, of: int) -> Estimate:
    """Estimate a share of independent trials, with Wilson's interval (1927): good for few trials and near 0 and 1.

    Raises DataError if there are no trials.
    """
    if of < 1:
        raise DataError(f"the share of {right} in {of} trials: there must be at least one trial")
    share, spread = right / of, _Z**2 / of
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * float(np.sqrt(share * (1 - share) / of + spread / (4 * of))) / (1 + spread)
    return Estimate(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def bootstrap(values: ArrayLike, seed: int) -> Estimate:
    """Estimate the mean of one value for each prompt. The interval resamples prompts (Efron 1979, percentiles).

    `values`: float[prompts]. The uncertainty is that of the choice of prompts. Completions of a prompt are not
    resampled. The seed determines every bit. DataError if there are no prompts.
    """
    given = np.asarray(values, np.float64)
    if not given.size:
        raise DataError("bootstrap: no prompt was measured: give at least one value")
    random = np.random.default_rng(seed)
    means = [given[random.integers(len(given), size=len(given))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(given.mean()), float(low), float(high))


def mean_of(values: ArrayLike, seed: int) -> Estimate:
    """Estimate the mean of one value for each prompt: by Wilson's interval if all are 0 or 1, else by `bootstrap`.

    Resamples of equal values would be equal, too. DataError if there are no prompts.
    """
    given = np.asarray(values, np.float64)
    return wilson(int(given.sum()), len(given)) if np.isin(given, (0, 1)).all() else bootstrap(given, seed)


class BesideSampling(Sampling):
    """How completions are sampled apart from training. Training samples the same tokens with and without them."""

    beside: ClassVar[bool] = True


async def judged(
    sampler: Sampler, prompts: Batch, sampling: Sampling, score: Score, *, n: int
) -> tuple[Batch, Batch | None]:
    """Score one greedy completion and `n` sampled ones for each prompt. None if `n` is 0."""
    greedy = await _scored(await rollout(sampler, prompts, sampling.model_copy(update=_GREEDY)), score)
    if not n:
        return greedy, None
    return greedy, await _scored(await rollout(sampler, prompts, sampling.model_copy(update={"n": n})), score)


async def _judge(
    sampler: Sampler, prompts: Batch, sampling: Sampling, score: Score | None = None
) -> tuple[str, Batch, Batch]:
    """Score one greedy completion and `sampling.n` sampled ones for each prompt. Also returns the reward's name.

    `score`: as for `rollouts`. Without it, the `rewards` of the rows count, which episodes have. Otherwise a completion
    is right if it equals the `answer`.
    """
    greedy = await rollout(sampler, prompts, sampling.model_copy(update=_GREEDY))
    name = "reward" if score or "rewards" in greedy else _EXACT
    greedy = await _scored(greedy, score)
    return name, greedy, await _scored(await rollout(sampler, prompts, sampling), score)


def _pass_at(rewards: NDArray[np.float32], k: int, threshold: float) -> NDArray[np.float64]:
    """Estimate pass@k of each prompt from its known rewards in [prompts, n]. Prompts with fewer than k are left out."""
    counts = (~np.isnan(rewards)).sum(axis=1)
    correct = (rewards >= threshold).sum(axis=1)
    return np.concatenate(
        [pass_at_k(correct[counts == n], n, k) for n in np.unique(counts).tolist() if n >= k] or [np.empty(0)]
    )


async def _numbers(greedy: Batch, sampled: Batch, n: int, threshold: float) -> Mapping[str, float]:
    """Return the numbers that a run records. A completion with a reward of `threshold` or more is right."""
    prompts = len(sampled) // n
    rewards = sampled.rewards.reshape(prompts, n)
    truncated, reward_errors = _error_counts(greedy, sampled)
    # Only the rows sampled last have the newest token, and no token column of the greedy ones is loaded.
    newest = int((await sampled.load("versions")).versions.values.max(initial=0))
    oldest = [int(each.row("oldest_version").min()) for each in (greedy, sampled)]
    means = {
        "eval/greedy": known_mean(_pass_at(greedy.rewards[:, None], 1, threshold)),
        **{f"eval/pass@{k}": known_mean(_pass_at(rewards, k, threshold)) for k in powers_of_2(n)},
        "eval/reward": known_mean(rewards),
    }
    return {name: mean for name, mean in means.items() if not np.isnan(mean)} | {
        "eval/truncated": truncated,
        "eval/reward_errors": reward_errors,
        "eval/prompts": prompts,
        "eval/version_oldest": min(oldest),
        "eval/version_newest": max(newest, *oldest),
    }


def _error_counts(*judged: Batch) -> tuple[float, int]:
    """The share of the last completions that were cut at the token limit, and all whose reward function raised."""
    errors = [error for each in judged if "reward_error" in each for error in each.objects("reward_error")]
    return float(np.asarray(judged[-1].row("truncated"), np.float64).mean()), sum(error is not None for error in errors)


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

    Call it before `run.steps`. The results go to evaluations.jsonl as `eval/greedy`, `eval/pass@k` and so on, and some
    of the greedy completions to samples.jsonl. An error in an evaluation ends the run. It begins when a step's weights
    are published, and training continues. So later tokens may come from newer weights, unless `config.pause_training`
    is set. `eval/version_oldest` and `eval/version_newest` show the versions. With `ahead = 0` the run trains on
    exactly the same data as without it.

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
    some = _first(prompts, config.rows)
    beside = BesideSampling(
        **sampling.model_dump(include={"max_tokens", "top_p", "top_k", "ignore_eos", "stop", "stop_tokens"}),
        n=config.n,
        temperature=config.temperature or sampling.temperature or 1.0,  # n greedy samples would all be equal
        seed=config.seed,
    )

    async def measure(done: int) -> Mapping[str, float]:
        _, greedy, sampled = await _judge(sampler, some, beside, score)
        await run.keep_held_out(greedy, done)
        return await _numbers(greedy, sampled, config.n, config.threshold)

    prepare = partial(publish, policy, sampler) if policy else None
    run.beside(Measurement(config.every, measure, config.pause_training, prepare))


def _first(batch: Batch, rows: int | None) -> Batch:
    """The first rows of a batch, all of them if `rows` is None."""
    return batch.select(np.arange(min(len(batch), rows or len(batch))))


async def _scored(rollouts: Batch, score: Score | None) -> Batch:
    if score is not None:
        rows, rollouts = len(rollouts), await score(rollouts)
        if len(rollouts) != rows:
            raise DataError(f"`score` returned {len(rollouts)} of {rows} rows: give each row a reward")
    elif "rewards" not in rollouts:
        rollouts = await _matched(rollouts)
    own = [name for name in rollouts.names if name.startswith("reward_")]
    return await rollouts.load("rewards", "truncated", "oldest_version", *own)


async def evaluate(
    sampler: Sampler, prompts: Batch, sampling: Sampling, score: Score | None = None
) -> dict[str, float]:
    """Measure the mean reward on held-out prompts: `greedy`, and `sampled` at the temperature, one completion each.

    The reward comes from `score`, else from the episodes of an environment, else from exact match. NaN if there are no
    prompts.
    """
    _, greedy, sampled, _, _ = await _means(sampler, prompts, sampling, score)
    return {"greedy": greedy, "sampled": sampled}


async def _means(
    sampler: Sampler, prompts: Batch, sampling: Sampling, score: Score | None
) -> tuple[str, float, float, list[dict[str, object]], Batch]:
    """Return the name of the reward, its means over greedy and sampled completions, and a row for each prompt.

    The greedy completions are last. A row has the rewards `greedy` and `sampled`, and the texts `prompt` and
    `completion` (greedy).
    """
    if not len(prompts):
        return "reward" if score else _EXACT, nan, nan, [], prompts
    name, greedy, sampled = await _judge(sampler, prompts, sampling.model_copy(update={"n": 1}), score)
    texts = [text for text in ("prompt", "completion") if text in greedy]
    greedy = await greedy.load("rewards", *texts)
    columns = {text: [*map(prompt_text, greedy.objects(text))] for text in texts}
    columns |= {"greedy": greedy.rewards.tolist(), "sampled": sampled.rewards.tolist()}
    rows = [{key: column[index] for key, column in columns.items()} for index in range(len(prompts))]
    means = [known_mean(each.rewards) for each in (greedy, sampled)]
    return name, means[0], means[1], rows, greedy


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
    of each prompt after the block go to held_out.jsonl, with small copies of its images. In a resumed run, "before"
    means before the first step of the whole run. If the block raises, there is no evaluation after it. `score` and
    `policy`: as for `evaluate_during`.

        async with held_out(run, sampler, task.held_out, config, reward.score):
            async for step in run.steps(config.steps):
                ...
    """
    reward: object = getattr(config, "reward", None)
    is_exact = isinstance(reward, RewardConfig) and list(reward.parts.values()) == [_EXACT]
    judged = None if is_exact else score

    rows: list[dict[str, object]] = []

    async def measure() -> dict[str, float]:
        name, greedy, sampled, rows[:], completions = await _means(sampler, prompts, config.sampling, judged)
        if config.evaluation and len(prompts):
            await run.keep_held_out(_first(completions, config.evaluation.rows))
        return {name: greedy, f"{name}_sampled": sampled}

    before = await run.once("held out", measure)
    evaluate_during(run, config.evaluation, sampler, prompts, config.sampling, score, policy=policy)
    yield
    after = await measure()
    if isinstance(images := prompts.columns.get(IMAGES), Images):
        small = await asyncio.to_thread(thumbnails, images)
        rows[:] = [{**row, IMAGES: own} for row, own in zip(rows, small, strict=True)]
    if rows:
        write_whole(run.folder / "held_out.jsonl", msgspec.json.Encoder(enc_hook=str).encode_lines(rows))
    for name, number in after.items():
        run.summary(**{f"{name}_before": before[name], f"{name}_after": number})


async def _matched(rollouts: Batch) -> Batch:
    """Add `rewards`: 1 if the completion equals the answer, else 0."""
    rollouts = await rollouts.load("completion", "answer")
    pairs = zip(rollouts.objects("completion"), rollouts.objects("answer"), strict=True)
    right = [exact_match("", str(text), {"answer": answer}) for text, answer in pairs]
    return rollouts.assign(rewards=np.array(right, np.float32))


class EvalOptions(Config):
    """The options of `meshrl eval`."""

    task: str | None = None
    """A configuration, a .jsonl or .parquet file that fits the run's templates, or a task of lm-evaluation-harness by
    name. Default: the run's own task."""
    n: int = Field(default=8, ge=0, le=MOST_COMPLETIONS)
    """Sampled completions for each prompt, for pass@k. 0: the greedy one alone."""
    reward: str | None = None
    """A reward function, named as in `reward.function`. Default: the run's reward."""
    threshold: float = 1.0
    """Lowest reward of a right completion."""
    rows: int | None = Field(default=None, ge=1)
    """Number of prompts, from the first on. Default: all."""
    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature. Default: the run's."""
    max_tokens: int | None = Field(default=None, gt=0)
    """New tokens of a completion at most. Default: the run's."""
    backend: str | None = None
    """The backend that samples. Default: the run's."""
    seed: int = 0
    """Seed for sampling and for the bootstrap."""

    @field_validator("temperature")
    @classmethod
    def _draws(cls, temperature: float | None) -> float | None:
        if temperature == 0:
            raise ValueError(
                "is greedy, but a greedy completion of each prompt is evaluated anyway: leave it out, or set the "
                "temperature of the others"
            )
        return temperature


class Evaluation(msgspec.Struct, frozen=True):
    """The measurements, as in `eval.json`."""

    model: str
    task: str
    prompts: int
    n: int
    temperature: float
    threshold: float
    seed: int
    greedy: Estimate
    """Share of prompts whose greedy completion is right, with Wilson's interval."""
    pass_at: dict[int, Estimate]
    """pass@k of sampled completions by k, with the interval of `mean_of`."""
    reward: Estimate
    """Mean reward of sampled completions, with the interval of `mean_of`."""
    truncated: float
    """Share of sampled completions that were cut at the token limit."""
    reward_errors: int
    measures: dict[str, Estimate] = {}
    """Means of the functions of a reward with several, over greedy completions, with the interval of `mean_of`."""

    def lines(self) -> Iterator[tuple[str, Estimate]]:
        """Yield each measurement with its name."""
        yield "greedy", self.greedy
        yield from self.measures.items()
        for k, estimate in self.pass_at.items():
            yield f"pass@{k}", estimate
        yield "mean reward", self.reward


async def evaluate_run(run: Path, options: EvalOptions) -> Evaluation:
    """Evaluate the newest model or checkpoint of a run. The result depends only on the seed. `run` is absolute.

    ConfigError if the run has none, DataError if there are no prompts. Errors of roles are raised too.
    """
    file = run / "config.toml"
    table, policy = read_policy(run)
    if options.task is not None and _is_named(options.task):
        try:
            tables = harness.tables(options.task, {"rows": options.rows} if options.rows else {})
        except ConfigError as error:
            near = did_you_mean(options.task, shipped_configs())
            raise ConfigError(f"{error}; as a configuration: {near}" if near else str(error)) from error
        table = {**table, **tables, "sampling": {**table_of(table, "sampling"), **table_of(tables, "sampling")}}
    prompts, source = _prompts(file, table, options)
    sampling = _sampling(file, table, options)
    engine = LocalEngine()
    with tempfile.TemporaryDirectory(prefix="meshrl-eval-") as scratch:
        try:
            newest, folder = await newest_model(run, policy, Path(scratch))
            mesh = await Mesh.reserve(engine, 1)
            config = _sampler_config(file, table, policy, folder, options)
            if config.chat and options.task is not None and _is_named(options.task):
                harness.check_chat(options.task, {})
            sampler = await mesh.spawn(implementation(Sampler, config.backend), config)
            judging = _reward_config(file, table, options)
            reward = await mesh.spawn(implementation(Reward, judging.backend), judging)
            greedy, sampled = await judged(sampler, prompts, sampling, reward.score, n=options.n)
        finally:
            await engine.close()
    return estimated(str(newest.path.relative_to(run)), source, greedy, sampled, options, sampling.temperature)


def estimated(
    model: str, source: str, greedy: Batch, sampled: Batch | None, options: EvalOptions, temperature: float
) -> Evaluation:
    """Return the measurements of judged completions, of `judged`. DataError if no reward of a batch is known."""
    drawn = greedy if sampled is None else sampled
    both = (greedy,) if sampled is None else (greedy, sampled)
    for each in both:
        if why := why_unknown(each):
            raise DataError(why)
    rewards = drawn.rewards.reshape(len(greedy), -1)
    means = [known_mean(row) for row in rewards]
    right = int((greedy.rewards >= options.threshold).sum())
    truncated, reward_errors = _error_counts(*both)
    columns = {name.removeprefix("reward_"): each for name, each in greedy.stored.items() if name.startswith("reward_")}
    parts = {name: each[~np.isnan(each)] for name, each in columns.items() if isinstance(each, np.ndarray)}
    return Evaluation(
        model=model,
        task=source,
        prompts=len(greedy),
        n=options.n,
        temperature=temperature,
        threshold=options.threshold,
        seed=options.seed,
        greedy=wilson(right, int((~np.isnan(greedy.rewards)).sum())),
        pass_at={
            k: mean_of(passed, options.seed)
            for k in (powers_of_2(options.n) if sampled is not None else ())
            if len(passed := _pass_at(rewards, k, options.threshold))
        },
        reward=mean_of([mean for mean in means if not np.isnan(mean)], options.seed),
        truncated=truncated,
        reward_errors=reward_errors,
        measures={name: mean_of(known, options.seed) for name, known in parts.items() if len(known)},
    )


def _is_named(task: str) -> bool:
    """True for the name of a task of lm-evaluation-harness, or its own file, not of a configuration or rows."""
    path = Path(task)
    if path.suffix == ".yaml":
        return True
    is_ours = any(name.startswith(f"{task}/") for name in shipped_configs())
    return not ("/" in task or path.exists() or path.suffix in (".jsonl", ".parquet", ".toml") or is_ours)


def _prompts(file: Path, table: Table, options: EvalOptions) -> tuple[Batch, str]:
    own = table_of(table, "task")
    if options.task is None or _is_named(options.task):
        config = validate(TaskConfig, own, file)
        source = "held out by the run" if options.task is None else config.source
    elif Path(options.task).suffix in (".jsonl", ".parquet"):
        given = {**own, "source": options.task, "options": {}, "held_out": 0}
        config, source = validate(TaskConfig, given, file), options.task
    else:
        other = find_config(options.task)
        given = table_of(load_toml(other), "task")
        config, source = validate(TaskConfig, given, other, folder=root_of(other)), str(other)
    task = Task.load(config)
    held_out = task.held_out if config.held_out else task.train
    if options.task is None and not config.held_out:
        raise DataError(
            f"{file}: the run trains on all of its prompts (task.held_out = 0), so there is nothing to evaluate it "
            "on: name a task, as in `meshrl eval RUN other.jsonl`"
        )
    return held_out.select(np.arange(min(len(held_out), options.rows or len(held_out)))), source


def _sampling(file: Path, table: Table, options: EvalOptions) -> Sampling:
    drawn = validate(Sampling, table_of(table, "sampling"), file)
    temperature = options.temperature or drawn.temperature or 1.0  # n greedy samples would all be equal
    limit = options.max_tokens or drawn.max_tokens
    return drawn.model_copy(
        update={"n": options.n, "seed": options.seed, "temperature": temperature, "max_tokens": limit}
    )


def _sampler_config(
    file: Path, table: Table, policy: PolicyConfig, folder: Path, options: EvalOptions
) -> SamplerConfig:
    shared = policy.model_dump(include={"dtype", "chat", "chat_template_kwargs"})
    backend = {"backend": options.backend} if options.backend else {}
    return validate(SamplerConfig, {**shared, **_role_table(table, "sampler"), "model": str(folder), **backend}, file)


def _reward_config(file: Path, table: Table, options: EvalOptions) -> RewardConfig | RewardModelConfig:
    if options.reward is not None:
        return RewardConfig(function=options.reward)
    own = _role_table(table, "reward")
    return validate(RewardModelConfig, own, file) if "model" in own else validate(RewardConfig, own, file)


def _role_table(table: Table, role: str) -> Table:
    """Return a role's table without the keys that place it in a run. Here each role runs alone."""
    return {key: value for key, value in table_of(table, role).items() if key not in ("mesh", "axes", "lora")}
