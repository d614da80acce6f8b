"""The table of a task: the source of its rows, and the templates for prompts and answers."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from meshrl.config import Config, PathIn
from meshrl.roles import ModelConfig


class MessageTemplate(Config):
    """A template for one message of a dialogue."""

    role: Literal["system", "user", "assistant", "tool"]
    """Role of the message's author."""
    content: str
    """Template of the message's text, in the format of `TaskConfig.prompt`."""


class TaskConfig(Config):
    """Where the rows of data come from, and the templates that turn a row into a prompt and an answer."""

    source: Annotated[str, PathIn(r"(?!\w+:)(.+\.(?:jsonl|parquet))")]
    """Where the rows come from: a .jsonl or .parquet file, a dataset of the hub (`hf:ORG/NAME` or
    `hf:ORG/NAME@REVISION`), `meshrl:spell_backward`, `reasoning_gym:NAME`, or `verifiers:ENV_ID`."""
    options: Mapping[str, JsonValue] = Field(default={})
    """Options of the source. For spell_backward: `min_word_len` (3), `max_word_len` (8), `size` (10,000) and `seed`
    (0). For reasoning_gym: `size`, `seed` and the dataset's own options. For verifiers: arguments for loading the
    environment. For the hub: arguments of `datasets.load_dataset`, such as `name`, the dataset's configuration, and
    `split` ("train")."""
    prompt: str = "{question}"
    """Template of the prompt, with the row's keys, as for `str.format`. `{metadata[word]}` reads a key of a nested
    table, and `{{` is a brace."""
    answer: str = "{answer}"
    """Template of the answer, in the same format. If the row's answer is null, the answer is the empty text."""
    dialogues: tuple[tuple[MessageTemplate, ...], ...] = ()
    """Templates of dialogues, which rows use in turn, instead of prompt and answer. `sft` learns the assistant's
    messages in the policy's chat template. Default: no dialogues."""
    max_prompt_tokens: int | None = Field(default=None, gt=0)
    """Leave out prompts with more tokens than this. Tokens are counted in the chat template of the policy, or of the
    first role with a model if there is no policy. By default no prompt is left out."""
    reader: ModelConfig | None = None
    """The model that counts tokens for `max_prompt_tokens`. The algorithm's configuration fills it in."""
    held_out: Annotated[int, Field(ge=0)] | Literal["all"] = 512
    """Number of prompts to hold out from training. "all" holds out every prompt of `held_out_fraction`, and 0 trains on
    every prompt."""
    held_out_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the prompts that `held_out` is drawn from. A hash of the prompt decides, so it is the same in every
    run."""
