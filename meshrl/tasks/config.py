"""The table of a task: where its rows are, and the templates for prompts and answers."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from meshrl.config import Config, PathIn
from meshrl.roles import ModelConfig


class MessageTemplate(Config):
    """A message of a dialogue."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    """A template, as `TaskConfig.prompt`."""


class TaskConfig(Config):
    """Rows of data, and the templates that make a prompt and an answer of each."""

    source: Annotated[str, PathIn(r"(?!\w+:)(.+\.(?:jsonl|parquet))")]
    """A .jsonl or .parquet file, a dataset of the hub (`hf:ORG/NAME` or `hf:ORG/NAME@REVISION`),
    `meshrl:spell_backward`, `reasoning_gym:NAME`, or `verifiers:ENV_ID`."""
    options: Mapping[str, JsonValue] = Field(default={})
    """Of spell_backward: `min_word_len` (3), `max_word_len` (8), `size` (10,000), `seed` (0). Of reasoning_gym: the
    last two, and the dataset's own. Of verifiers: what the environment is loaded with. Of the hub: what
    `datasets.load_dataset` takes, such as `name`, the dataset's configuration, and `split` ("train")."""
    prompt: str = "{question}"
    """`str.format` template over the row's keys; `{metadata[word]}` reaches into a table, `{{` is a brace."""
    answer: str = "{answer}"
    """The same. An answer that is null gives the empty text."""
    dialogues: tuple[tuple[MessageTemplate, ...], ...] = ()
    """Templates of dialogues, of which rows have one after the other: `sft` learns the assistant's turns of it, in the
    policy's chat template, in place of prompt and answer. Nothing means none."""
    longest: int | None = Field(default=None, gt=0)
    """Leave prompts of more tokens out, of the policy's tokens (where there is none, of the first role's with
    a model) and in its chat template; nothing means none."""
    reader: ModelConfig | None = None
    """Whose tokens `longest` counts; filled in by an algorithm's configuration."""
    held_out: Annotated[int, Field(ge=0)] | Literal["all"] = 512
    """Prompts that are never trained on; "all" that the fraction sets apart, and 0 to train on every one."""
    held_out_fraction: float = Field(default=0.1, gt=0, lt=1)
    """The share of prompts that `held_out` is drawn from, by a hash of the prompt: the same in every run."""
