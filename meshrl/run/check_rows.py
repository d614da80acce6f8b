"""Find mistakes in a task's rows before a model loads: in each line, its prompt and its length."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from meshrl.errors import ConfigError, DataError, ModelError, shortened
from meshrl.roles import ModelConfig, Sampling, count_tokens
from meshrl.run.check_model import longest_of
from meshrl.tasks import TaskConfig, counted, dialogue, fill_answer, fill_prompt, load_quietly, read_rows

_OF_A_FILE: Final = 20_000
_MADE: Final = 100
"""Rows that are checked at most if rows are generated, which are all alike, or downloaded, which takes time."""
_TOLD: Final = 3
"""Rows that are reported at most for each kind of mistake."""


class _Prompt(NamedTuple):
    where: str
    text: str


def find_row_mistakes(
    task: TaskConfig, model: ModelConfig | None, sampling: Sampling | None, *, evaluates: bool = False
) -> list[str]:
    """Return mistakes in the first rows of a task. Files are read to the end unless they are long.

    Each row must be readable, fit the templates, and leave `model` room for `sampling.max_tokens`. If all rows are
    read, some must be left to train on, and some to evaluate with if the run `evaluates`.
    """
    lacking: list[str] = []
    prompts: list[_Prompt] = []
    most = _most(task)
    for number, (where, row) in enumerate(islice(read_rows(task, None if _is_file(task) else most), most)):
        try:
            prompts.append(_Prompt(where, fill_prompt(task, row, where)))
            fill_answer(task, row, where)
            dialogue(task, number, row, where)
        except DataError as error:
            lacking.append(str(error))
    if lacking:
        return list(_some(lacking))
    mistakes = list(_unreadable(task, model, sampling, prompts)) if model else []
    if not mistakes and task.max_prompt_tokens is not None:
        try:
            counted(task, [prompt.text for prompt in prompts])
        except (ConfigError, ModelError) as error:
            mistakes.append(str(error))
    if _is_file(task) and unseen(task) is None and not mistakes:
        mistakes += _left(task, evaluates=evaluates)
    return mistakes


def find_row_doubts(task: TaskConfig, prompts: int) -> list[str]:
    """Doubt a file with fewer training prompts than a batch of `prompts` needs. Its rows must be valid."""
    if not _is_file(task) or unseen(task) is not None:
        return []
    there = len(load_quietly(task).train)
    doubt = (
        f"prompts = {prompts}: {task.source} has {there} training prompts, so a batch has some of them more than once, "
        f"as separate groups: give more rows, or set prompts = {there}"
    )
    return [doubt] if there < prompts else []


def unseen(task: TaskConfig) -> str | None:
    """Say which rows of a task were checked, if not all."""
    most = _most(task)
    if _is_file(task) and next(islice(read_rows(task), most, None), None) is None:
        return None
    return "of the task's rows, " + (
        "only the first was checked" if most == 1 else f"only the first {most:,} were checked"
    )


def _most(task: TaskConfig) -> int:
    if _is_file(task):
        return _OF_A_FILE
    return _MADE if task.source.startswith(("meshrl:", "reasoning_gym:")) else 1


def _is_file(task: TaskConfig) -> bool:
    return Path(task.source).suffix in {".jsonl", ".parquet"}


def _left(task: TaskConfig, *, evaluates: bool) -> Iterator[str]:
    try:
        held_out = load_quietly(task).held_out  # a run reports what it leaves out when it loads the task
    except DataError as error:
        yield str(error)
        return
    if evaluates and not len(held_out):
        yield (
            f"{task.source}: [evaluation] needs held-out prompts, and these rows have none: set task.held_out, give "
            "more rows, or remove [evaluation]"
        )


def _unreadable(
    task: TaskConfig, model: ModelConfig, sampling: Sampling | None, prompts: Sequence[_Prompt]
) -> Iterator[str]:
    """Yield prompts with characters that the model lacks, and prompts that leave no room for a completion."""
    try:
        counts = count_tokens(model, [prompt.text for prompt in prompts])
    except ModelError as error:
        yield str(error)
        return
    if counts is None:
        return
    longest, new = longest_of(model.model), sampling.max_tokens if sampling else 1
    room = None if longest is None else longest - new
    strange: list[str] = []
    long: list[str] = []
    for prompt, count in zip(prompts, counts, strict=True):
        if isinstance(count, str):
            strange.append(f"{prompt.where}: {count}")
        elif room is not None and count > room and (task.max_prompt_tokens is None or count <= task.max_prompt_tokens):
            long.append(f"{prompt.where}: the prompt has {count} tokens: {shortened(prompt.text)}")
    yield from _some(strange)
    yield from _some(long)
    if long:
        yield (
            f"the model takes {longest} tokens, which with {new} new ones (sampling.max_tokens) leaves {room} for a "
            f"prompt: set task.max_prompt_tokens = {room} to leave longer ones out, or lower sampling.max_tokens"
        )


def _some(mistakes: Sequence[str]) -> Iterator[str]:
    yield from mistakes[:_TOLD]
    if (more := len(mistakes) - _TOLD) > 0:
        yield f"and {more:,} more rows"
