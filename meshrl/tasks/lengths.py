"""Leave out prompts of a task that are too long for its model."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from meshrl import log
from meshrl.errors import ConfigError, DataError
from meshrl.roles import count_tokens
from meshrl.tasks.config import TaskConfig

T = TypeVar("T")


def short_enough(config: TaskConfig, rows: Mapping[str, T], *, quiet: bool = False) -> Mapping[str, T]:
    """Filter rows, keyed by prompt: drop those with more than `config.max_prompt_tokens` tokens.

    Logs the number of dropped rows unless `quiet`. ConfigError if no backend can count tokens, DataError if no row is
    left.
    """
    if config.max_prompt_tokens is None:
        return rows
    counts = counted(config, list(rows))
    left = {
        prompt: row
        for (prompt, row), count in zip(rows.items(), counts, strict=True)
        if isinstance(count, str) or count <= config.max_prompt_tokens
    }
    if not left:
        raise DataError(
            f"{config.source}: each of its {len(rows)} prompts has more than "
            f"task.max_prompt_tokens = {config.max_prompt_tokens} tokens"
        )
    if (gone := len(rows) - len(left)) and not quiet:
        log.info(
            f"{config.source}: {gone} of {len(rows)} prompts are left out: they have more than "
            f"{config.max_prompt_tokens} tokens"
        )
    return left


def counted(config: TaskConfig, prompts: Sequence[str]) -> Sequence[int | str]:
    """Count tokens like `count_tokens`, with the reader for `config.max_prompt_tokens`. ConfigError if none can."""
    counts = count_tokens(config.reader, prompts) if config.reader else None
    if counts is None:
        raise ConfigError(
            f"task.max_prompt_tokens = {config.max_prompt_tokens}: there is no tokenizer to count tokens with: "
            "give the folder of a model, or remove task.max_prompt_tokens"
        )
    return counts
