"""Text to tokens and back, in one way for all roles: prompts, completions, dialogues, and the character tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from meshrl.data import Batch, Ragged
from meshrl.errors import ConfigError, DataError, ModelError, described

PAD: Final = 0
END: Final = 1
"""The tokens of a character tokenizer that are not characters."""
Template: TypeAlias = Mapping[str, JsonValue]
"""Variables of a chat template, by name."""
Message: TypeAlias = Mapping[str, str]
Part: TypeAlias = tuple[str, bool]
"""A piece of the rendered text, and whether it is learned."""

_ASSISTANT: Final = "assistant"
_KEYS: Final = ("role", "content")


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
    texts = prompts
    if chat is not None:
        texts = [in_template(tokenizer, [{"role": "user", "content": text}], chat, opens=True) for text in texts]
    tokens = _encode(tokenizer, texts, special=chat is None)
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no token: generation needs one to start")
    return tokens


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts within a row, with nothing before or after them. DataError for texts that it cannot encode."""
    return _encode(tokenizer, texts, special=False)


def encode_completions(tokenizer: PreTrainedTokenizerBase, completions: Sequence[str]) -> list[list[int]]:
    """Encode each completion, and append the end-of-text token."""
    end = end_token(tokenizer)
    return [[*ids, end] for ids in encode_texts(tokenizer, completions)]


def encode_dialogues(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], completions: Sequence[str], chat: Template
) -> list[list[int]]:
    """Encode each prompt and completion as a user's and an assistant's message in the tokenizer's template.

    DataError for texts that the template refuses or the tokenizer cannot encode.
    """
    dialogues = [
        [{"role": "user", "content": prompt}, {"role": _ASSISTANT, "content": completion}]
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    try:
        texts = [in_template(tokenizer, dialogue, chat) for dialogue in dialogues]
    except Exception as error:
        raise DataError(f"the chat template refuses a row: {type(error).__name__}: {error}") from error
    return encode_texts(tokenizer, texts)


def in_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, object]],
    variables: Template,
    *,
    opens: bool = False,
    tools: Sequence[Mapping[str, object]] = (),
) -> str:
    """Render messages in the tokenizer's chat template, which may raise anything.

    `opens`: end with the opening of an assistant's turn.
    """
    given: dict[str, Any] = dict(variables)
    turns: list[Any] = [dict(message) for message in messages]
    if tools:
        given["tools"] = [dict(tool) for tool in tools]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=opens, **given)
    return str(text)


def decode(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """Decode each row of tokens, without special tokens."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):  # one call for all rows: twice as fast
        return tokenizer.backend_tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=True)
    return [str(tokenizer.decode(list(row), skip_special_tokens=True)) for row in rows]


def reach_of(stop: Sequence[str]) -> int:
    """Return the number of tokens, up to the newest, that may be part of a stop text that it completes."""
    return 4 * max(map(len, stop)) + 4  # a character has at most four bytes, and a token at least one


def stopped_after(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], begun: int, stop: Sequence[str]
) -> int | None:
    """Return the number of tokens after which a stop text is complete. None if never. The first `begun` have none."""
    reach = reach_of(stop)
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


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], special: bool) -> list[list[int]]:
    if not texts:
        return []
    try:
        return list(tokenizer(list(texts), add_special_tokens=special)["input_ids"])
    except Exception as error:
        known = {token for token in tokenizer.get_vocab() if len(token) == 1}
        for text in texts:
            bare = text
            for token in tokenizer.all_special_tokens:
                bare = bare.replace(token, "")
            if strange := sorted(set(bare) - known):
                raise DataError(
                    f"the text {_short(text)!r} has {', '.join(map(repr, strange))}, which the tokenizer does "
                    f"not know; its characters are {''.join(sorted(known))!r}: add to model.characters, or clean "
                    "the text"
                ) from error
        raise DataError(f"the tokenizer cannot encode {_short(texts[0])!r}...: {error}") from error


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def encoded(model: Words, batch: Batch) -> Batch:
    """Add `tokens` and `loss_mask`, from `messages` or else from `prompt` and `completion`.

    DataError for a row that is too long, and for invalid dialogues as in `encode_messages`.
    """
    if "messages" in batch:
        return encode_messages(model, batch)
    prompts = encode_prompts(model.tokenizer, texts_of(batch, "prompt"), model.chat)
    completions = encode_completions(model.tokenizer, texts_of(batch, "completion"))
    tokens = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    for row, ids in enumerate(tokens):
        model.check_lengths(len(ids), f"row {row}")
    masks = [np.arange(len(ids)) >= len(prompt) for prompt, ids in zip(prompts, tokens, strict=True)]
    return batch.assign(tokens=Ragged.of(tokens, np.int32), loss_mask=Ragged.of(masks, np.bool_))


def encode_messages(words: Words, batch: Batch) -> Batch:
    """Add `tokens` and `loss_mask` from `messages`. `learn`, a text for each row, is "all" if it is missing.

    `messages`: a list of `{"role": ..., "content": ...}` for each row. The assistant's turns are learned, all or the
    last, from after the template's opening of the turn through the token that ends it. Each piece is tokenised
    separately, like a prompt before generation. ModelError if the tokenizer has no template. DataError for a row that
    is not a dialogue, that the template refuses or does not render piece by piece, that has nothing to learn, or that
    is too long.
    """
    if not words.tokenizer.chat_template:
        raise ModelError(
            f"`messages` are rendered by the chat template, and the tokenizer of "
            f"{words.tokenizer.name_or_path or 'this model'} has none: use an instruction-tuned model, or the columns "
            "`prompt` and `completion`"
        )
    rows = batch.objects("messages") if len(batch) else ()
    learn = batch.objects("learn") if len(batch) and "learn" in batch else ("all",) * len(rows)
    tokens: list[list[int]] = []
    masks: list[list[bool]] = []
    for row, (value, which) in enumerate(zip(rows, learn, strict=True)):
        messages = _dialogue(value, row)
        if which not in ("all", "last"):
            raise DataError(f'row {row}: `learn` is {which!r}: use "all" or "last"')
        parts = list(_parts(words, messages, which == "last", row))
        pieces = encode_texts(words.tokenizer, [text for text, _ in parts])
        mask: list[bool] = []
        for (_, is_learned), piece in zip(parts, pieces, strict=True):  # up to the first token that ends a text
            end = next((at for at, token in enumerate(piece) if token in words.ends), len(piece))
            mask += [is_learned and at <= end for at in range(len(piece))]
        if not any(mask):
            raise DataError(f"row {row}: its dialogue has no assistant's turn to learn: drop the row")
        words.check_lengths(len(mask), f"row {row}")
        tokens.append(list(chain.from_iterable(pieces)))
        masks.append(mask)
    return batch.assign(tokens=Ragged.of(tokens, np.int32), loss_mask=Ragged.of(masks, np.bool_))


def _parts(words: Words, messages: Sequence[Message], only_last: bool, row: int) -> Iterator[Part]:
    """Yield the rendered text in pieces: learned ones, and those in between."""

    def rendered(count: int, opens: bool = False) -> str:
        try:
            return in_template(words.tokenizer, messages[:count], words.chat or {}, opens=opens)
        except Exception as error:
            raise DataError(f"row {row}: the chat template refuses it: {described(error)}") from error

    turns = [at for at, message in enumerate(messages) if message["role"] == _ASSISTANT]
    seen = ""
    for at in turns[-1:] if only_last else turns:
        opened, ended = rendered(at, opens=True), rendered(at + 1)
        yield _added(seen, opened, at, row), False
        yield _added(opened, ended, at, row), True
        seen = ended


def _added(before: str, after: str, at: int, row: int) -> str:
    """Return what the template adds to its previous text. DataError if it changed that text."""
    if after.startswith(before):
        return after[len(before) :]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    place = len(list(same))
    raise DataError(
        f"row {row}: the chat template renders the text before message {at} differently with that message, so the "
        f"message's tokens are unknown: at character {place} it has {after[place : place + 30]!r} in place of "
        f"{before[place : place + 30]!r}. Templates that drop the thoughts of earlier turns do so: learn 'last', or "
        "give each turn as a separate row"
    )


def _dialogue(messages: object, row: int) -> Sequence[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"row {row}: `messages` is {messages!r:.60}: give a list of {{'role': ..., 'content': ...}}")
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in _KEYS):
            raise DataError(
                f"row {row}: message {at} is {message!r:.60}: give {{'role': ..., 'content': ...}}, both texts"
            )
    return cast("Sequence[Message]", messages)


def observed(words: Words, rows: Batch) -> tuple[Batch, NDArray[np.bool_]]:
    """Append the tokens of `observation` to rows. Also returns the rows without room, bool[rows].

    The new tokens are not learned, their log-probs are 0 and their versions -1. A row has no room if the model could
    not read it and one more token, and is returned unchanged. DataError for a text that the tokenizer cannot encode.
    """
    texts = [str(text) if text else "" for text in rows.objects("observation")]
    encoded = encode_texts(words.tokenizer, texts)
    lengths, added = rows.tokens.lengths, np.array([len(ids) for ids in encoded], np.int64)
    full = (added > 0) & (lengths + added + 1 > words.max_tokens)
    ids = [[] if no_room else row for row, no_room in zip(encoded, full.tolist(), strict=True)]

    def after(column: Ragged, new: list[list[int]], dtype: type[np.generic]) -> Ragged:
        parts = [np.concatenate([had, np.array(add, dtype)]) for had, add in zip(column, new, strict=True)]
        return Ragged.of(parts, dtype)

    nothing = [[0] * len(row) for row in ids]
    whole = rows.assign(
        tokens=after(rows.tokens, ids, np.int32),
        loss_mask=after(rows.loss_mask, nothing, np.bool_),
        sampler_logprobs=after(rows.sampler_logprobs, nothing, np.float32),
        versions=after(rows.versions, [[-1] * len(row) for row in ids], np.int32),
    )
    return whole.drop("observation"), full
