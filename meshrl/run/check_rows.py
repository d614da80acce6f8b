"""Find mistakes in the rows of a task: whether each can be read, fits the model, and makes an example to learn."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, cast

import numpy as np

from meshrl.agents import AgentConfig
from meshrl.config import Config, dotted
from meshrl.data import Batch
from meshrl.errors import ConfigError, DataError, ModelError, shortened
from meshrl.roles import (
    ModelConfig,
    PolicyConfig,
    RewardTrainingConfig,
    SamplerConfig,
    Sampling,
    backends_with,
    count_tokens,
    function_of,
    takes_images,
)
from meshrl.run.config import AlgorithmConfig, table_of, tables_of, uses_model
from meshrl.run.memory import longest_of
from meshrl.tasks import TaskConfig, counted, filled_rows, first_row, load_quietly, prompts_of, read_rows

_FILE_ROWS: Final = 20_000
"""Rows of a file that are checked at most."""
_OTHER_ROWS: Final = 100
"""Rows of other sources that are checked at most, which are generated all alike, or downloaded."""
_REPORTED: Final = 3
"""Rows that are reported at most for each kind of mistake."""


def find_row_mistakes(task: TaskConfig, config: Config) -> list[str]:
    """Return mistakes in the first rows of a task. Files are read to the end unless they are long.

    Each row must be readable, fit the templates, and leave the model room for `sampling.max_tokens`. The algorithm must
    be able to make an example of it, which fits its model. If all rows are read, some must be left to train on, and
    some to evaluate with if there is an `evaluation`.
    """
    try:
        return _row_mistakes(task, config)
    except (ConfigError, DataError, ModelError) as error:
        return [str(error)]


def _row_mistakes(task: TaskConfig, config: Config) -> list[str]:
    rows, mistakes = filled_rows(task, _first_rows(task, _most(task)))
    if mistakes:
        return _first(mistakes)
    if mistakes := _roles_without_images(task, config):
        return mistakes
    models = (table_of(config, "policy", PolicyConfig), table_of(config, "sampler", SamplerConfig))
    if model := next((model for model in models if model and uses_model(model) != "ignored"), None):
        mistakes += _unreadable(task, model, table_of(config, "sampling", Sampling), rows)
    if not mistakes and isinstance(config, AlgorithmConfig):
        mistakes += _mistakes_of_examples(config, _short(task, rows))
    evaluates = getattr(config, "evaluation", None) is not None
    if unchecked_rows(task) is None and not mistakes:
        held_out = load_quietly(task).held_out  # a run reports what it leaves out when it loads the task
        if evaluates and not len(held_out):
            mistakes.append(
                f"{task.source}: [evaluation] needs held-out prompts, and these rows have none: set task.held_out, "
                "give more rows, or remove [evaluation]"
            )
    return mistakes


def _roles_without_images(task: TaskConfig, config: Config) -> list[str]:
    """Return the roles of a task with images that take none, and its agent, which gets the text of a row alone."""
    agents = [path for path, table in tables_of(config) if isinstance(table, AgentConfig)]
    if task.images and agents:
        wrong = f"task.images: {dotted(agents[0])} gets the text of a row, and none of its images"
        remedy = "remove task.images, and let the program send each file as a data URL in its requests (docs/images.md)"
        return [f"{wrong}: {remedy}"]
    tables = [(path, table) for path, table in tables_of(config) if isinstance(table, PolicyConfig | SamplerConfig)]
    for _, table in tables:
        if task.images and (check := function_of(table.backend, "SEES")):
            check(table)
    return [
        f"task.images: {dotted(path)}.backend = {table.backend!r} takes no images: set it to one of "
        f"{', '.join(map(repr, filter(takes_images, backends_with(table.role))))}"
        for path, table in tables
        if task.images and not takes_images(table.backend)
    ]


def find_row_doubts(task: TaskConfig, prompts: int) -> list[str]:
    """Doubt a task with fewer training prompts than a batch of `prompts` needs. Its rows must be valid."""
    if unchecked_rows(task) is not None:
        return []
    count = len(load_quietly(task).train)
    doubt = (
        f"prompts = {prompts}: {task.source} has {count} training prompts, so a batch has some of them more than once, "
        f"as separate groups: give more rows, or set prompts = {count}"
    )
    return [doubt] if count < prompts else []


def find_prompt_doubts(task: TaskConfig) -> list[str]:
    """Doubt a prompt that takes some of a row's messages, and leaves out what its system says. Rows must be valid."""
    prompt, _, row = first_row(task)
    return [
        f"task.prompt: {task.prompt!r} leaves out the system's message, {shortened(content)}, of `{key}` of "
        f"the first row: write {{{key}}} alone for all messages, with policy.chat = true"
        for key, value in row.items()
        if isinstance(prompt, str) and f"{{{key}[" in task.prompt and isinstance(value, list)
        for each in cast("list[object]", value)
        if isinstance(each, Mapping) and each.get("role") == "system"
        if isinstance(content := each.get("content"), str) and content not in prompt
    ]


def find_pair_doubts(task: TaskConfig, config: AlgorithmConfig) -> list[str]:
    """Doubt pairs of equal texts, if the algorithm makes pairs. The task's rows must be valid."""
    if type(config).examples is AlgorithmConfig.examples:
        return []
    pairs = config.examples(_short(task, filled_rows(task, _first_rows(task, _most(task)))[0]))
    if "preferred" not in pairs or not len(same := np.flatnonzero(pairs.row("preferred") == 0)):
        return []
    count = f"{len(same) // 2:,} of {len(pairs) // 2:,} pairs have two equal texts"
    return [f"{count}, and nothing is learned from them: the first is that of {pairs.place(int(same[0]))}"]


def _short(task: TaskConfig, rows: Batch) -> Batch:
    """Return the rows whose prompt has at most `task.max_prompt_tokens` tokens."""
    if task.max_prompt_tokens is None:
        return rows
    counts = counted(task, rows)
    return rows.select([row for row, count in enumerate(counts) if _fits(count, task.max_prompt_tokens)])


def _first_rows(task: TaskConfig, most: int) -> Iterable[tuple[str, dict[str, object]]]:
    return islice(read_rows(task, None if _is_file(task) else most), most)


def unchecked_rows(task: TaskConfig) -> str | None:
    """Say which rows of a task were checked, if not all."""
    most = _most(task)
    if next(islice(_first_rows(task, most + 1), most, None), None) is None:
        return None
    return f"of the task's rows, only the first {most:,} were checked"


def _most(task: TaskConfig) -> int:
    return _FILE_ROWS if _is_file(task) else _OTHER_ROWS


def _is_file(task: TaskConfig) -> bool:
    return Path(task.source).suffix in {".jsonl", ".parquet"}


def _fits(count: int | str, most: int) -> bool:
    """True for a number of tokens up to `most`, and for the reason why they could not be counted."""
    return isinstance(count, str) or count <= most


def _mistakes_of_examples(config: AlgorithmConfig, rows: Batch) -> list[str]:
    """Return rows that the algorithm cannot learn from, or else examples that the model which learns cannot read."""
    mistakes: list[str] = []
    try:
        examples = config.examples(rows)
    except DataError:
        for row in range(len(rows)):
            try:
                config.examples(rows.select([row]))
            except DataError as error:
                mistakes.append(str(error))
        return _first(mistakes)
    kinds = (PolicyConfig, RewardTrainingConfig)
    learners = (table for _, table in tables_of(config) if isinstance(table, kinds) and uses_model(table) != "ignored")
    if examples is rows or (learner := next(learners, None)) is None:
        return []
    counts = count_tokens(learner, examples) or ()
    return _first([*dict.fromkeys(count for count in counts if isinstance(count, str))])


def _unreadable(task: TaskConfig, model: ModelConfig, sampling: Sampling | None, rows: Batch) -> list[str]:
    """Return prompts with characters that the model lacks, and prompts that leave no room for a completion."""
    counts = count_tokens(model, prompts_of(rows))
    if counts is None:
        return []
    longest, new = longest_of(model.model), sampling.max_tokens if sampling else 1
    room = None if longest is None else longest - new
    strange: list[str] = []
    long: list[str] = []
    for row, count in enumerate(counts):
        if isinstance(count, str):
            strange.append(count)
        elif room is not None and count > room and _fits(count, task.max_prompt_tokens or count):
            prompt = shortened(rows.objects("prompt")[row])
            long.append(f"{rows.place(row)}: the prompt has {count} tokens: {prompt}")
    remedy = (
        f"the model takes {longest} tokens, which with {new} new ones (sampling.max_tokens) leaves {room} for a "
        f"prompt: set task.max_prompt_tokens = {room} to leave longer ones out, or lower sampling.max_tokens"
    )
    return [*_first(strange), *_first(long), *([remedy] if long else [])]


def _first(mistakes: Sequence[str]) -> list[str]:
    more = len(mistakes) - _REPORTED
    return [*mistakes[:_REPORTED], *([f"and {more:,} more rows"] if more > 0 else [])]
