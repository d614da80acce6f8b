"""Rows as a model reads them: each is one text, rendered whole and encoded once. Offsets say what is learned."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch, Message, Ragged, messages_in
from meshrl.errors import DataError, ModelError, described
from meshrl.tags import opened_tag
from meshrl_torch.model.text import (
    ASSISTANT,
    MARK,
    Run,
    Words,
    alike,
    encode_after,
    encode_dialogues,
    encode_parts,
    in_template,
    messages_of,
    prefix_of,
    prompts_of,
    texts_of,
)


class _Text(NamedTuple):
    """A row before it is encoded."""

    text: str
    parts: Sequence[Run]
    """From which character to which it is learned."""
    end: int | None
    """The token to append if the text ends with no end."""
    is_bare: bool = False
    """True if the tokens that the tokenizer puts before a text are missing."""

    def cut(self) -> "_Text":
        """Return the row without what follows its last part."""
        return self._replace(text=self.text[: self.parts[-1][1]])


def encoded(words: Words, batch: Batch) -> Batch:
    """Add `tokens` and `loss_mask`, from `messages` or else from `prompt` and `completion`.

    With `chat`, prompt and completion are two messages. DataError for a row that is too long, or without a token before
    those that are learned, and for invalid dialogues as in `encode_messages`.
    """
    if "messages" in batch:
        return encode_messages(words, batch)
    pairs = zip(prompts_of(batch, words.chat), texts_of(batch, "completion"), strict=True)
    if words.chat is None:
        return _with_tokens(words, batch, [_joined(words, str(prompt), [completion]) for prompt, completion in pairs])
    dialogues = [_Dialogue(words, messages_of(*each), batch.place(row)) for row, each in enumerate(pairs)]
    return _with_tokens(words, batch, [each.text(only_last=True).cut() for each in dialogues])


def encode_messages(words: Words, batch: Batch) -> Batch:
    """Add `tokens` and `loss_mask` from `messages`. `learn`, a text for each row, is "all" if it is missing.

    `messages`: a list of `{"role": ..., "content": ...}` for each row, which is read up to the assistant's last turn.
    The assistant's turns are learned, all or the last, from after the template's opening of the turn through the token
    that ends it. If the template ends the last turn with none, the row ends there with the tokenizer's. If it leaves a
    part of that turn out, such as thoughts, the turn is appended to its prompt instead. ModelError if the tokenizer has
    no template. DataError for a row that is not a dialogue, that the template refuses, of whose earlier learned turns
    it leaves a part out, that has nothing to learn, or that is too long.
    """
    if not words.tokenizer.chat_template:
        raise ModelError(
            f"`messages` are rendered by the chat template, and the tokenizer of "
            f"{words.tokenizer.name_or_path or 'this model'} has none: use an instruction-tuned model, or the columns "
            "`prompt` and `completion`"
        )
    rows = batch.objects("messages") if len(batch) else ()
    learn = batch.objects("learn") if len(batch) and "learn" in batch else ("all",) * len(rows)
    texts: list[_Text] = []
    for row, (value, which) in enumerate(zip(rows, learn, strict=True)):
        where = batch.place(row)
        messages = messages_in(value, f"{where}: `messages`")
        if which not in ("all", "last"):
            raise DataError(f'{where}: `learn` is {which!r}: use "all" or "last"')
        texts.append(_Dialogue(words, messages, where).text(only_last=which == "last"))
    return _with_tokens(words, batch, texts)


def judged(words: Words, batch: Batch, pad: int | None = None) -> Batch:
    """Add `tokens` as a reward model reads them, and `loss_mask`, True at the last one, or at that of each of `steps`.

    `pad`: a token that is no part of a text if it is at its end. DataError for a row that the model cannot read, that
    has no step, or that has a step without tokens.
    """
    if "steps" in batch:
        rows, scored = _encoded_steps(words, batch, pad)
    else:
        rows = judged_tokens(words, batch, pad)
        scored = [[len(ids) - 1] for ids in rows]
    for row, ids in enumerate(rows):
        try:
            check_judged(words, ids)
        except DataError as error:
            raise DataError(f"{batch.place(row)} cannot be judged: {error}") from error
    tokens = Ragged.of(rows, np.int32)
    places = [start + at for start, own in zip(tokens.offsets[:-1].tolist(), scored, strict=True) for at in own]
    mask = np.zeros(len(tokens.values), np.bool_)
    mask[places] = True
    return batch.assign(tokens=tokens, loss_mask=Ragged(mask, tokens.offsets))


def judged_tokens(words: Words, batch: Batch, pad: int | None) -> list[Sequence[int]]:
    """Return the tokens of prompts with completions, up to the last that is not padding, where classifiers score."""
    prompts, completions = prompts_of(batch, words.chat), texts_of(batch, "completion")
    if words.chat is not None:
        coded = encode_dialogues(words.tokenizer, prompts, completions, words.chat)
        return [_unpadded(ids, pad) for ids in coded]
    texts = [_joined(words, str(prompt), [each]) for prompt, each in zip(prompts, completions, strict=True)]
    rows = enumerate(zip(texts, _tokens(words, texts), strict=True))
    return [_unpadded(_started(batch.place(row), text, *coded), pad) for row, (text, coded) in rows]


def check_judged(words: Words, ids: Sequence[int]) -> None:
    """Raise DataError if a reward model cannot read these tokens."""
    if not ids:
        raise DataError("the row has no token")
    words.check_row(ids, "the row")


def _encoded_steps(words: Words, batch: Batch, pad: int | None) -> tuple[list[Sequence[int]], list[list[int]]]:
    """Return the tokens of each row, and the place in it of each step's last token."""
    if words.chat is not None:
        raise DataError(
            "a chat template has no `steps`: set chat = false and write the template's marks into `task.prompt`, "
            "or leave `steps` out"
        )
    steps = [_steps_of(own, batch.place(row)) for row, own in enumerate(batch.objects("steps") if len(batch) else ())]
    texts = [_joined(words, str(prompt), own) for prompt, own in zip(prompts_of(batch, None), steps, strict=True)]
    rows: list[Sequence[int]] = []
    scored: list[list[int]] = []
    for row, ((ids, parts), own) in enumerate(zip(_tokens(words, texts), steps, strict=True)):
        starts = [start for start, _ in parts] + [len(ids)]
        if not own or not all(own) or any(start == after for start, after in pairwise(starts)):
            raise DataError(f"{batch.place(row)} has the steps {own!r}: each needs a token, at which it is scored")
        rows.append(_unpadded(ids, pad))
        scored.append([*(start - 1 for start in starts[1:-1]), len(rows[-1]) - 1])
    return rows, scored


def _steps_of(own: object, where: str) -> list[str]:
    if not isinstance(own, Sequence) or isinstance(own, str) or not all(isinstance(each, str) for each in own):
        raise DataError(f"`steps` of {where} is {own!r}: give a list of texts, one for each step")
    return [str(each) for each in own]


def _unpadded(ids: Sequence[int], pad: int | None) -> Sequence[int]:
    end = len(ids)
    while end and ids[end - 1] == pad:
        end -= 1
    return ids[:end]


def observed(words: Words, rows: Batch) -> tuple[Batch, NDArray[np.bool_]]:
    """Append the tokens of `observation` to rows. Also returns the rows without room, bool[rows].

    The new tokens are those of a text that continues the row. They are not learned, have log-probs of 0, and the
    version -1. A row has no room if the model could not read it and one more token, and is returned unchanged.
    DataError for a text that the tokenizer cannot encode.
    """
    texts = [str(text) if text else "" for text in rows.objects("observation")]
    encoded = encode_after(words.tokenizer, [row.tolist() for row in rows.tokens], texts)
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


def _joined(words: Words, prompt: str, pieces: Sequence[str]) -> _Text:
    """Return a prompt and the pieces of its completion as one text."""
    places = np.cumsum([len(prompt), *map(len, pieces)]).tolist()
    return _Text("".join([prompt, *pieces]), list(pairwise(places)), words.end, is_bare=True)


def _tokens(words: Words, texts: Sequence[_Text]) -> list[tuple[list[int], list[Run]]]:
    """Encode each text once, and return the tokens of its parts. An appended end belongs to the last part."""
    prefix = prefix_of(words.tokenizer) if any(each.is_bare for each in texts) else []
    rows: list[tuple[list[int], list[Run]]] = []
    coded = encode_parts(words.tokenizer, [each.text for each in texts], [each.parts for each in texts])
    for each, (ids, parts) in zip(texts, coded, strict=True):
        put = prefix if each.is_bare and ids[: len(prefix)] != prefix else []
        tokens = [*put, *ids]
        runs = [(len(put) + start, len(put) + end) for start, end in parts]
        if each.end is not None and (not tokens or tokens[-1] not in words.ends):
            tokens.append(each.end)
            runs[-1:] = [(start, len(tokens)) for start, _ in runs[-1:]]
        rows.append((tokens, runs))
    return rows


def _with_tokens(words: Words, batch: Batch, texts: Sequence[_Text]) -> Batch:
    """Add the columns. Each part is learned through its first token that ends a text."""
    tokens: list[list[int]] = []
    masks: list[NDArray[np.bool_]] = []
    for row, (text, (ids, parts)) in enumerate(zip(texts, _tokens(words, texts), strict=True)):
        mask = np.zeros(len(ids), np.bool_)
        for start, end in parts:
            mask[start : next((at + 1 for at in range(start, end) if ids[at] in words.ends), end)] = True
        words.check_row(ids, batch.place(row))
        tokens.append(_started(batch.place(row), text, ids, parts))
        masks.append(mask)
    return batch.assign(tokens=Ragged.of(tokens, np.int32), loss_mask=Ragged.of(masks, np.bool_))


def _started(where: str, text: _Text, ids: list[int], parts: Sequence[Run]) -> list[int]:
    """Return a row's tokens. DataError if its first one is learned, because the model predicts it from nothing."""
    start = text.parts[0][0]
    if parts[0][0] == 0:
        why = "has no token" if not start else "shares its only token with the completion"
        raise DataError(f"{where}: the prompt {text.text[:start]!r:.60} {why}: generation needs one to start")
    return ids


class _Dialogue:
    """A dialogue as the template renders it, up to the assistant's last turn."""

    def __init__(self, words: Words, messages: Sequence[Message], where: str) -> None:
        """Raises DataError if the assistant has no turn, or if the template refuses it."""
        self._words, self._where = words, where
        self._turns = [at for at, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not self._turns:
            raise DataError(f"{where}: its dialogue has no assistant's turn to learn: drop the row")
        self._messages = messages[: self._turns[-1] + 1]
        self._whole = self._rendered(self._messages)

    def text(self, *, only_last: bool = False) -> _Text:
        """Return the row. DataError if the template leaves out a part of an earlier turn that is learned."""
        *earlier, last = self._turns
        found = [self._turn(at) for at in (() if only_last else earlier)]
        part = self._turn(last)
        whole, end = self._whole, None
        if part is None:
            if any(value and not isinstance(cast("object", value), str) for value in self._messages[last].values()):
                raise self._left_out(last)  # such as a call of a tool, which no text says
            whole, part, end = self._continued()
        elif not part[2]:
            whole, end = whole[: part[1]], self._words.end
        for at, each in zip(earlier, found, strict=False):
            if each is None or not whole.startswith(self._whole[: each[1]]):
                raise self._left_out(at)
        return _Text(whole, [(start, stop) for start, stop, _ in (*filter(None, found), part)], end)

    def _left_out(self, at: int) -> DataError:
        return DataError(
            f"{self._where}: the chat template leaves out a part of message {at}, "
            f"{self._messages[at]['content']!r:.60}, so the turn cannot be learned. Templates that drop the "
            "thoughts of earlier turns do so: learn 'last', or give each turn as a separate row"
        )

    def _continued(self) -> tuple[str, tuple[int, int, bool], int | None]:
        """Append the last turn to its prompt, and return the text, the turn in it, and the token to append.

        A tag that the prompt opens, such as that of thoughts, is not repeated.
        """
        *before, message = self._messages
        prompt, content = self._rendered(before, opens=True), message["content"]
        tag = opened_tag(prompt).strip()
        if tag and content.lstrip().startswith(tag):
            content = content.lstrip().removeprefix(tag).lstrip("\n")
        closing, end = self._words.closing
        text = prompt + content + closing
        return text, (len(prompt), len(text), bool(closing)), self._words.end if end is None else None

    def _turn(self, at: int) -> tuple[int, int, bool] | None:
        """Return from which character to which a turn is, and whether a token ends it. None if a part is left out."""
        shown, messages = self._content(at), self._messages
        opened = self._rendered(messages[:at], opens=True)
        if shown is None:
            if messages[at]["content"].strip() or not self._whole.startswith(opened):
                return None
            shown = len(opened), len(opened)  # nothing is left out, as before the call of a tool
        start, limit = len(opened), len(self._whole)
        if not self._whole.startswith(opened):
            start = self._opening(at, opened, shown[0])
        if at + 1 < len(messages) and (after := self._content(at + 1)):
            limit = after[0]
        ends = [(self._whole.find(text, shown[1], limit), text) for text in self._words.end_texts]
        place, end = min(((place, text) for place, text in ends if place >= 0), default=(shown[1], ""))
        stop = place + len(end)
        begin = self._content(at - 1) if at else None
        turn = _squeezed(self._whole[begin[1] if begin else 0 : stop])
        for name, text in messages[at].items():
            if name == "role" or not isinstance(cast("object", text), str) or _squeezed(text) in turn:
                continue
            if name == "content" or MARK in self._rendered([*messages[:at], {**messages[at], name: MARK}]):
                return None
        return start, stop, bool(end)

    def _opening(self, at: int, opened: str, begin: int) -> int:
        """Return where a turn starts whose prompt is rendered differently without it: after what opens it, if found."""
        before = self._rendered(self._messages[:at])
        opening = opened[alike(opened, before) :]
        previous = self._content(at - 1) if at else None
        for size in range(len(opening), 0, -1):
            place = self._whole.rfind(opening[:size], previous[1] if previous else 0, begin)
            if place >= 0:
                return place + size
        return begin

    def _content(self, at: int) -> Run | None:
        """Return from which character to which a message's content is. None if it is nowhere."""
        message = {**self._messages[at], "content": MARK}
        marked = self._rendered([*self._messages[:at], message, *self._messages[at + 1 :]])
        if MARK not in marked:
            return None
        before, after = marked.partition(MARK)[0], marked.rpartition(MARK)[2]
        start = alike(self._whole, before)
        return start, max(start, len(self._whole) - alike(self._whole[::-1], after[::-1]))

    def _rendered(self, messages: Sequence[Message], *, opens: bool = False) -> str:
        try:
            return in_template(self._words.tokenizer, messages, self._words.chat or {}, opens=opens)
        except Exception as error:
            raise DataError(f"{self._where}: the chat template refuses it: {described(error)}") from error


def _squeezed(text: str) -> str:
    return "".join(text.split())
