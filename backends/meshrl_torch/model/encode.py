"""Encode texts, dialogues and an environment's observations as a batch's token columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch, Ragged
from meshrl.errors import DataError, ModelError
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.text import Words, encode_completions, encode_prompts, encode_texts, in_template, texts_of


def encoded(model: LanguageModel, batch: Batch) -> Batch:
    """Add `tokens` and `loss_mask`, from `messages` or else from `prompt` and `completion`.

    DataError for a row that is too long, and for invalid dialogues as in `encode_messages`.
    """
    if "messages" in batch:
        return encode_messages(model, batch)
    prompts = encode_prompts(model.tokenizer, texts_of(batch, "prompt"), model.chat)
    completions = encode_completions(model.tokenizer, texts_of(batch, "completion"))
    pairs = list(zip(prompts, completions, strict=True))
    for row, (prompt, completion) in enumerate(pairs):
        model.check_lengths(len(prompt) + len(completion), f"row {row}")
    masks = [[False] * len(prompt) + [True] * len(completion) for prompt, completion in pairs]
    return batch.assign(
        tokens=Ragged.of([prompt + completion for prompt, completion in pairs], np.int32),
        loss_mask=Ragged.of(masks, np.bool_),
    )


Learn: TypeAlias = Literal["all", "last"]
"""The assistant's turns that are learned."""
Message: TypeAlias = Mapping[str, str]
Part: TypeAlias = tuple[str, bool]
"""A piece of the rendered text, and whether it is learned."""

_ASSISTANT: Final = "assistant"


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
    for row, (messages, which) in enumerate(zip(rows, learn, strict=True)):
        parts = list(_parts(words, _dialogue(messages, row), _learned(which, row), row))
        pieces = encode_texts(words.tokenizer, [text for text, _ in parts])
        tokens.append([token for piece in pieces for token in piece])
        learned = (_mask(piece, part[1], words.ends) for part, piece in zip(parts, pieces, strict=True))
        masks.append([each for mask in learned for each in mask])
        if not any(masks[-1]):
            raise DataError(f"row {row}: its dialogue has no assistant's turn to learn: drop the row")
        words.check_lengths(len(tokens[-1]), f"row {row}")
    return batch.assign(tokens=Ragged.of(tokens, np.int32), loss_mask=Ragged.of(masks, np.bool_))


def _parts(words: Words, messages: Sequence[Message], learn: Learn, row: int) -> Iterator[Part]:
    """Yield the rendered text in pieces: learned ones, and those in between."""
    turns = [at for at, message in enumerate(messages) if message["role"] == _ASSISTANT]
    seen = ""
    for at in turns if learn == "all" else turns[-1:]:
        opened = _render(words, messages[:at], row, opens=True)
        ended = _render(words, messages[: at + 1], row)
        yield _added(seen, opened, at, row), False
        yield _added(opened, ended, at, row), True
        seen = ended


def _mask(piece: Sequence[int], learned: bool, ends: frozenset[int]) -> list[bool]:
    """Mark the learned tokens of a piece: none, or all up to the first that ends a text."""
    end = next((at for at, token in enumerate(piece) if token in ends), len(piece))
    return [learned and at <= end for at in range(len(piece))]


def _added(before: str, after: str, at: int, row: int) -> str:
    """Return what the template adds to its previous text. DataError if it changed that text."""
    if after.startswith(before):
        return after[len(before) :]
    where = next((place for place, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), 0)
    place = min(where, len(before), len(after))
    raise DataError(
        f"row {row}: the chat template renders the text before message {at} differently with that message, so the "
        f"message's tokens are unknown: at character {place} it has {after[place : place + 30]!r} in place of "
        f"{before[place : place + 30]!r}. Templates that drop the thoughts of earlier turns do so: learn 'last', or "
        "give each turn as a separate row"
    )


def _render(words: Words, messages: Sequence[Message], row: int, opens: bool = False) -> str:
    try:
        return in_template(words.tokenizer, messages, words.chat or {}, add_generation_prompt=opens)
    except Exception as error:
        raise DataError(f"row {row}: the chat template refuses it: {type(error).__name__}: {error}") from error


def _dialogue(messages: object, row: int) -> Sequence[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"row {row}: `messages` is {messages!r:.60}: give a list of {{'role': ..., 'content': ...}}")
    for at, message in enumerate(messages):
        texts = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not texts:
            raise DataError(
                f"row {row}: message {at} is {message!r:.60}: give {{'role': ..., 'content': ...}}, both texts"
            )
    return cast("Sequence[Message]", messages)


def _learned(which: object, row: int) -> Learn:
    if which not in get_args(Learn):
        raise DataError(f'row {row}: `learn` is {which!r}: use "all" or "last"')
    return cast("Learn", which)


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
