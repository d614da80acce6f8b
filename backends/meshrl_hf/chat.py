"""The chat format of a Hugging Face model: its tokenizer and its chat template, without the network."""

from collections.abc import Sequence
from typing import Any

from meshrl.agents import Message, Tool
from meshrl.errors import DataError, ModelError, described
from meshrl.roles import ModelConfig, NewModel
from meshrl_hf.files import folder_of
from meshrl_hf.loading import new_config, read_words
from meshrl_hf.text import Template, Words, character_tokenizer, decode, encode_texts, words


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
        given: dict[str, Any] = dict(self._variables)
        turns: list[Any] = [dict(message.shown()) for message in messages]
        offered: list[Any] | None = [dict(tool) for tool in tools] or None
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tools=offered, tokenize=False, add_generation_prompt=True, **given
            )
        except Exception as error:
            raise DataError(f"the model's chat template refuses these messages: {described(error)}") from error
        return str(text)

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
        made = config.model
        tokenizer = character_tokenizer(made.characters, made.max_tokens, made.chat_template)
        known = words(tokenizer, new_config(made, tokenizer), None, None)
    else:
        known = read_words(config, folder_of(config.model))
    return HuggingFaceChat(known, config.chat_template_kwargs)
