"""Evaluate what a run has trained: its newest model on held-out prompts, with pass@k and confidence intervals."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from pydantic import Field, field_validator

from meshrl.config import Config, Table, load_toml, validate
from meshrl.data import Batch
from meshrl.engines.local import LocalEngine
from meshrl.errors import DataError
from meshrl.mesh import Mesh
from meshrl.observe import table_of
from meshrl.roles import (
    MOST_COMPLETIONS,
    PolicyConfig,
    Reward,
    RewardModelConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    implementation,
)
from meshrl.run.artifacts import newest_model
from meshrl.run.evaluation.estimates import Estimate, bootstrap, pass_at_k, powers_of_2, wilson
from meshrl.run.evaluation.judge import judge
from meshrl.run.jobs import find_config, root_of
from meshrl.tasks import RewardConfig, Task, TaskConfig

_FILES: Final = (".jsonl", ".parquet")
_OF_A_RUN: Final = ("mesh", "axes", "lora")
"""Keys that place a role in a run. Here each role runs alone."""


class Question(Config):
    """The options of `meshrl eval`."""

    task: str | None = None
    """A configuration, or a .jsonl or .parquet file that fits the run's templates. Default: the run's own task."""
    n: int = Field(default=8, ge=1, le=MOST_COMPLETIONS)
    """Completions for each prompt, for pass@k."""
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

    @property
    def ks(self) -> list[int]:
        """The powers of 2 up to n, and n."""
        return powers_of_2(self.n)


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
    """pass@k of sampled completions by k, with the bootstrap's interval over prompts."""
    reward: Estimate
    """Mean reward of sampled completions, with the interval of pass@k."""
    truncated: float
    """Share of sampled completions that were cut at the token limit."""
    reward_errors: int

    def lines(self) -> Iterator[tuple[str, Estimate]]:
        """Yield each measurement with its name."""
        yield "greedy", self.greedy
        for k, estimate in self.pass_at.items():
            yield f"pass@{k}", estimate
        yield "mean reward", self.reward


async def evaluate_run(run: Path, question: Question) -> Evaluation:
    """Evaluate the newest model or checkpoint of a run. The result depends only on the seed. `run` is absolute.

    ConfigError if the run has none, DataError if there are no prompts. Errors of roles are raised too.
    """
    file = run / "config.toml"
    table = load_toml(file)
    policy = validate(PolicyConfig, table_of(table, "policy"), file)
    prompts, source = _prompts(file, table, question)
    sampling = _sampling(file, table, question)
    engine = LocalEngine()
    with tempfile.TemporaryDirectory(prefix="meshrl-eval-") as scratch:
        try:
            newest, folder = await newest_model(run, policy, Path(scratch))
            mesh = await Mesh.reserve(engine, 1)
            config = _sampler_config(file, table, policy, folder, question)
            sampler = await mesh.spawn(implementation(Sampler, config.backend), config)
            judging = _reward_config(file, table, question)
            reward = await mesh.spawn(implementation(Reward, judging.backend), judging)
            judged = await judge(sampler, prompts, sampling, reward.score)
        finally:
            await engine.close()
    correct = (judged.sampled >= question.threshold).sum(axis=1)
    right = int((judged.greedy >= question.threshold).sum())
    return Evaluation(
        model=str(newest.relative_to(run)),
        task=source,
        prompts=len(prompts),
        n=question.n,
        temperature=sampling.temperature,
        threshold=question.threshold,
        seed=question.seed,
        greedy=wilson(right, len(prompts)),
        pass_at={k: bootstrap(pass_at_k(correct, question.n, k), question.seed) for k in question.ks},
        reward=bootstrap(judged.sampled.mean(axis=1, dtype=np.float64), question.seed),
        truncated=judged.truncated,
        reward_errors=judged.reward_errors,
    )


def _prompts(file: Path, table: Table, question: Question) -> tuple[Batch, str]:
    """Return the prompts, and their source."""
    own = table_of(table, "task")
    if question.task is None:
        config, source = validate(TaskConfig, own, file), "held out by the run"
    elif Path(question.task).suffix in _FILES:
        given = {**own, "source": question.task, "options": {}, "held_out": 0}
        config, source = validate(TaskConfig, given, file), question.task
    else:
        other = find_config(question.task)
        given = table_of(load_toml(other), "task")
        config, source = validate(TaskConfig, given, other, folder=root_of(other)), str(other)
    task = Task.load(config)
    held_out = task.held_out if config.held_out else task.train
    if question.task is None and not config.held_out:
        raise DataError(
            f"{file}: the run trains on all of its prompts (task.held_out = 0), so there is nothing to evaluate it "
            "on: name a task, as in `meshrl eval RUN other.jsonl`"
        )
    return held_out.select(np.arange(min(len(held_out), question.rows or len(held_out)))), source


def _sampling(file: Path, table: Table, question: Question) -> Sampling:
    drawn = validate(Sampling, table_of(table, "sampling"), file)
    temperature = question.temperature or drawn.temperature or 1.0  # n greedy samples would all be equal
    limit = question.max_tokens or drawn.max_tokens
    return drawn.model_copy(
        update={"n": question.n, "seed": question.seed, "temperature": temperature, "max_tokens": limit}
    )


def _sampler_config(file: Path, table: Table, policy: PolicyConfig, folder: Path, question: Question) -> SamplerConfig:
    own = {key: value for key, value in table_of(table, "sampler").items() if key not in _OF_A_RUN}
    shared = policy.model_dump(include={"dtype", "chat", "chat_template_kwargs"})
    given = {**shared, **own, "model": str(folder)}
    return validate(SamplerConfig, {**given, **({"backend": question.backend} if question.backend else {})}, file)


def _reward_config(file: Path, table: Table, question: Question) -> RewardConfig | RewardModelConfig:
    if question.reward is not None:
        return RewardConfig(function=question.reward)
    own = {key: value for key, value in table_of(table, "reward").items() if key not in _OF_A_RUN}
    return validate(RewardModelConfig, own, file) if "model" in own else validate(RewardConfig, own, file)
