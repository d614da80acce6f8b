"""The chat format of a Hugging Face model, and the lengths of prompts: its tokenizer and template alone, no weights."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from meshrl.agents import Message, Tool
from meshrl.errors import DataError, ModelError, described
from meshrl.roles import ModelConfig, NewModel
from meshrl_torch.model.loading import folder_of, new_config, new_tokenizer, quiet, read_tokenizer, read_words
from meshrl_torch.model.text import (
    Template,
    Words,
    decode,
    encode_prompts,
    encode_texts,
    in_template,
    words,
)


class HuggingFaceChat:
    """Implements `meshrl.agents.Chat`."""

    def __init__(self, known: Words, variables: Template | None = None) -> None:
        """`variables`: for the chat template. ModelError if the tokenizer has no template."""
        if not known.tokenizer.chat_template:
            raise ModelError(
                f"agents need a chat template, and the tokenizer of {known.tokenizer.name_or_path or 'this model'} "
                "has none: use an instruction-tuned model, or set chat_template in its tokenizer_config.json"
            )
        self.ends = known.ends
        self.max_tokens = known.max_tokens
        self._tokenizer = known.tokenizer
        self._variables = variables or {}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Render messages in the template. DataError if it refuses them."""
        turns = [message.shown() for message in messages]
        try:
            return in_template(self._tokenizer, turns, self._variables, opens=True, tools=tools)
        except Exception as error:
            raise DataError(f"the model's chat template refuses these messages: {described(error)}") from error

    def encode(self, text: str) -> Sequence[int]:
        """Encode a text, which may contain special tokens by name."""
        (tokens,) = encode_texts(self._tokenizer, [text])
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens, without special ones."""
        return decode(self._tokenizer, [tokens])[0]


def read_chat(config: ModelConfig) -> HuggingFaceChat:
    """Read the chat format of the model in a role's table. ModelError if it has no template."""
    if isinstance(config.model, NewModel):
        tokenizer = new_tokenizer(config.model)
        known = words(tokenizer, new_config(config.model, tokenizer), None, None)
    else:
        known = read_words(config, folder_of(config.model))
    return HuggingFaceChat(known, config.chat_template_kwargs)


def count_prompts(config: ModelConfig, prompts: Sequence[str]) -> Sequence[int | str] | None:
    """Count the tokens of each prompt, in the chat template if configured, or say why it cannot be read.

    None for a model that must first be downloaded, or converted. ModelError if a folder has no tokenizer.
    """
    model = config.model
    if isinstance(model, NewModel):
        tokenizer = new_tokenizer(model)
    elif not (Path(model).expanduser() / "config.json").is_file():
        return None
    else:
        with quiet():
            tokenizer = read_tokenizer(model, folder_of(model))
    try:
        return [len(tokens) for tokens in encode_prompts(tokenizer, prompts, config.template)]
    except Exception:  # noqa: BLE001 -- one prompt fails, and is found below; a template may raise anything
        return [_one(tokenizer, prompt, config) for prompt in prompts]


def _one(tokenizer: PreTrainedTokenizerBase, prompt: str, config: ModelConfig) -> int | str:
    try:
        return len(encode_prompts(tokenizer, [prompt], config.template)[0])
    except DataError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 -- a template may raise anything
        return f"the chat template refuses {prompt[:60]!r}: {described(error)}"
