"""Text to tokens and back, in one way for all roles, and the character tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pydantic import JsonValue
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from meshrl.data import Batch
from meshrl.errors import ConfigError, DataError, ModelError

PAD: Final = 0
END: Final = 1
"""The tokens of a character tokenizer that are not characters."""
Template: TypeAlias = Mapping[str, JsonValue]
"""Variables of a chat template, by name."""


@dataclass(frozen=True)
class Words:
    """How a model encodes and decodes texts: everything except the network."""

    tokenizer: PreTrainedTokenizerBase
    chat: Template | None
    """Template variables, if each prompt is one user message in the tokenizer's template. None: it stays as it is."""
    ends: frozenset[int]
    """The tokens that end a text."""
    max_tokens: int
    """The longest sequence that the model supports."""

    def check_lengths(self, longest: int, what: str) -> None:
        """Raise DataError if a sequence is longer than the model supports."""
        if longest > self.max_tokens:
            raise DataError(
                f"{what} has {longest} tokens and the model takes at most {self.max_tokens}: shorten the row, or "
                "choose a model for longer texts"
            )


def words(
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    generation: GenerationConfig | None,
    chat: Template | None,
) -> Words:
    """Read a tokenizer and configurations. ModelError if there is no end-of-text token, or no template for `chat`."""
    ends = None if generation is None else generation.eos_token_id
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if chat is not None and not tokenizer.chat_template:
        raise ModelError(
            f"chat = true, but the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template: use an "
            "instruction-tuned model, or chat = false"
        )
    return Words(tokenizer, chat, frozenset(stops | {end_token(tokenizer)}), int(longest or (1 << 62)))


def character_tokenizer(characters: str, max_tokens: int, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Make a tokenizer with one token for each character, after `<pad>` (PAD) and `<eos>` (END). No BOS token."""
    twice = sorted({character for character in characters if characters.count(character) > 1})
    if twice or not characters:
        wrong = f"has {''.join(twice)!r} twice" if twice else "is empty"
        raise ConfigError(f"model.characters {wrong}: list each character that a text may have exactly once")
    vocabulary = {token: index for index, token in enumerate(("<pad>", "<eos>", *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=max_tokens,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], chat: Template | None
) -> list[list[int]]:
    """Encode each prompt as generation starts from it, with the tokenizer's prefix of a text.

    With `chat`, each prompt is one user message in the tokenizer's template. DataError for a prompt without tokens, or
    one that cannot be encoded.
    """
    texts = list(prompts)
    if chat is not None:
        texts = [
            in_template(tokenizer, [{"role": "user", "content": text}], chat, add_generation_prompt=True)
            for text in texts
        ]
    tokens = _encode(tokenizer, texts, special=chat is None)
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no token: generation needs one to start")
    return tokens


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts within a row, with nothing before or after them. DataError for texts that it cannot encode."""
    return _encode(tokenizer, list(texts), special=False)


def encode_completions(tokenizer: PreTrainedTokenizerBase, completions: Sequence[str]) -> list[list[int]]:
    """Encode each completion, and append the end-of-text token."""
    end = end_token(tokenizer)
    tokens = _encode(tokenizer, list(completions), special=False)
    return [[*ids, end] for ids in tokens]


def encode_dialogues(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str], chat: Template
) -> list[list[int]]:
    """Encode each prompt and completion as a user's and an assistant's message in the tokenizer's template.

    DataError for texts that the template refuses or the tokenizer cannot encode.
    """
    texts: list[str] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        dialogue = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        try:
            texts.append(in_template(tokenizer, dialogue, chat))
        except Exception as error:
            raise DataError(f"the chat template refuses a row: {type(error).__name__}: {error}") from error
    return _encode(tokenizer, texts, special=False)


def in_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    variables: Template,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Render messages in the tokenizer's chat template, which may raise anything."""
    given: dict[str, Any] = dict(variables)
    turns: list[Any] = [dict(message) for message in messages]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt, **given)
    return str(text)


def decode(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """Decode each row of tokens, without special tokens."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):  # one call for all rows: twice as fast
        return tokenizer.backend_tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=True)
    return [str(tokenizer.decode(list(row), skip_special_tokens=True)) for row in rows]


def stopped_after(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], begun: int, stop: Sequence[str]
) -> int | None:
    """Return the number of tokens after which a stop text is complete. None if never. The first `begun` have none."""
    # A character has at most four bytes, and a token at least one, so older tokens are not part of a new stop text.
    reach = 4 * max(map(len, stop)) + 4
    ends = range(begun + 1, len(tokens) + 1)
    texts = decode(tokenizer, [tokens[max(0, end - reach) : end] for end in ends])
    return next((end for end, text in zip(ends, texts, strict=True) if any(each in text for each in stop)), None)


def end_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the end-of-text token. ModelError if there is none."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no end-of-text token, so no completion "
            "could end: set eos_token in its tokenizer_config.json"
        )
    return end


def texts_of(batch: Batch, name: str) -> list[str]:
    """Return a column of texts. DataError if a value is not text."""
    values = batch.objects(name) if len(batch) else ()
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(f"`{name}` of row {row} is {value!r} ({type(value).__name__}), not text")
    return [str(value) for value in values]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> list[list[int]]:
    if not texts:
        return []
    try:
        return list(tokenizer(texts, add_special_tokens=special)["input_ids"])
    except Exception as error:
        known = {token for token in tokenizer.get_vocab() if len(token) == 1}
        for text in texts:
            bare = text
            for token in tokenizer.all_special_tokens:
                bare = bare.replace(token, "")
            strange = sorted(set(bare) - known)
            if strange:
                raise DataError(
                    f"the text {_short(text)!r} has {', '.join(map(repr, strange))}, which the tokenizer does "
                    f"not know; its characters are {''.join(sorted(known))!r}: add to model.characters, or clean "
                    "the text"
                ) from error
        raise DataError(f"the tokenizer cannot encode {_short(texts[0])!r}...: {error}") from error


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
