"""Tasks by name: evaluate a model on one as a run of a single step, and the recipe that trains on one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import tomli_w

from meshrl.config import Config, Table, apply_overrides, validate
from meshrl.data import Batch, Metrics
from meshrl.observe import table_of
from meshrl.roles import Reward, Sampler, SamplerConfig, Sampling
from meshrl.run.config import RunConfig
from meshrl.run.evaluation import EvalOptions, Evaluation, estimated, judged
from meshrl.run.run import Run
from meshrl.tasks import RewardConfig, Task, TaskConfig, harness

_SHOWN: Final = 256
"""Rows that an evaluation keeps to be read."""
_MATHS: Final[Mapping[str, tuple[str, str]]] = {
    "gsm8k": ("question", "numeric_answer"),
    "hendrycks_math": ("problem", "math_answer"),
}
"""By the start of a task's name: the key of its problem, and the shipped reward that reads its answers."""


class _Evaluated(Config):
    """What an evaluation of a model reads."""

    sampler: SamplerConfig
    task: TaskConfig
    reward: RewardConfig
    sampling: Sampling
    run: RunConfig


async def evaluate_task(model: str, options: EvalOptions, overrides: Sequence[str] = ()) -> tuple[Evaluation, Path]:
    """Evaluate a model on the task `options.task` by its name, and return the result and the folder of its run.

    `model`: a folder, or a name on the hub. `overrides`: keys of `sampler`, `sampling`, `task`, `reward` and `run`. The
    run has one step. Raises ConfigError for an unknown task, DataError for one that no completion answers, and the
    errors of roles.
    """
    name, given = str(options.task), _set_by(overrides)
    known = harness.tables(name, table_of(table_of(given, "task"), "options"))
    drawn = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
    drawn = {key: value for key, value in drawn.items() if value is not None}
    table: Table = {
        **known,
        "sampler": {"model": model, **({"backend": options.backend} if options.backend else {})},
        "sampling": {**table_of(known, "sampling"), **drawn},
        "run": {"name": f"eval-{Path(name).stem}", "log": [], "samples_rows": _SHOWN},
    }
    if options.reward or "reward" in given:
        table["reward"] = {"function": options.reward} if options.reward else {}
    apply_overrides(table, overrides)
    config = validate(_Evaluated, table, "command line", overrides)
    if config.sampler.chat:
        harness.check_chat(name, config.task.options)
    given_rows = {**config.task.options, **({"rows": options.rows} if options.rows else {})}
    prompts = Task.load(config.task.model_copy(update={"options": given_rows})).train
    prompts = prompts.select(np.arange(min(len(prompts), options.rows or len(prompts))))
    prompts = prompts.assign(groups=np.arange(len(prompts), dtype=np.int64))
    async with Run(config.run, config.model_dump(mode="json")) as run:
        run.recorder.leaves_failures = False
        sampler = await run.spawn(Sampler, config.sampler)
        reward = await run.spawn(Reward, config.reward)
        judgements: list[tuple[Batch, Batch | None]] = []
        async for _ in run.steps(1):
            greedy, sampled = await judged(sampler, prompts, config.sampling, reward.score, n=options.n)
            judgements.append((greedy, sampled))
            await run.record(Metrics({}), greedy if sampled is None else sampled)
        ((greedy, sampled),) = judgements
        sampling = config.sampling.temperature
        result = estimated(model, f"{harness.NAME}:{name}", greedy, sampled, options, sampling)
        run.summary(**{key: each.value for key, each in result.lines()})
    return result, run.folder


def _set_by(overrides: Sequence[str]) -> Table:
    """Return the tables that overrides set."""
    table: Table = {}
    apply_overrides(table, [each for each in overrides if not each.startswith("~")])
    return table


def recipe(name: str, model: str, overrides: Sequence[str] = ()) -> Table:
    """Return a configuration that trains a model by GRPO on the training rows of a task by its name.

    Raises ConfigError for an unknown task, and DataError for one without rows to train on.
    """
    given = _set_by(overrides)
    options = {"split": "train", "num_fewshot": 0, **table_of(table_of(given, "task"), "options")}
    known, maths = harness.settings_of(name, options), _maths(name)
    harness.check_trains(name, options)
    if table_of(given, "policy").get("chat") and not maths:
        harness.check_chat(name, options)
    ending = "\nThink step by step, and put the final answer in \\boxed{{}}."
    prompt = {"prompt": f"{{lm_eval[doc][{maths[0]}]}}{ending}"} if maths else {}
    stop = {"stop": list(known.stop)} if known.stop and not maths else {}
    reward = {"function": maths[1]} if maths else harness.reward_of(known.measures)
    table: Table = {
        "algorithm": "grpo",
        "prompts": 16,
        "steps": 200,
        "run": {"name": Path(name).stem},
        "task": {"source": f"{harness.NAME}:{name}", "options": options, "held_out": 128, **prompt},
        "policy": {"model": model, "optimizer": {"lr": 1e-6, "warmup_steps": 10}},
        "reward": {} if "reward" in given else reward,
        "sampling": {"n": 8, "max_tokens": max(512, known.max_tokens), **stop},
        "evaluation": {"every": 50, "rows": 64},
    }
    apply_overrides(table, overrides)
    return table


def recipe_text(name: str, table: Table) -> str:
    """Write a recipe as TOML, to be saved and edited."""
    return f"# GRPO on {name}\n#\n# Made by `meshrl train {name}`.\n{tomli_w.dumps(table, multiline_strings=True)}"


def _maths(name: str) -> tuple[str, str] | None:
    own = harness.named(name)
    return next((value for start, value in _MATHS.items() if own.startswith(start)), None)
