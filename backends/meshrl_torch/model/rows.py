"""Rows as a model reads them: each is one text, rendered whole and encoded once. Offsets say what is learned."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch, Images, Message, Ragged, messages_in, names_in
from meshrl.errors import DataError, ModelError, described
from meshrl.tags import opened_tag
from meshrl_torch.model.text import (
    ASSISTANT,
    Run,
    Words,
    alike,
    encode_after,
    encode_parts,
    encode_texts,
    images_in,
    in_template,
    messages_of,
    prompts_of,
    texts_of,
    unused,
)
from meshrl_torch.model.vision import images_of


class _Text(NamedTuple):
    """A row before it is encoded."""

    text: str
    parts: Sequence[Run]
    """From which character to which it is learned."""
    end: int | None
    """The token to append if the text ends with no end."""
    is_bare: bool = False
    """True if the tokens that the tokenizer puts before a text are missing."""
    names: Sequence[str] = ()
    """The images in it."""

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
    has no step, that has a step without tokens, or whose prompt has images.
    """
    for row, prompt in enumerate(prompts_of(batch, words.chat if words.chat is not None else {})):
        if images_in(messages_of(prompt)):
            raise DataError(f"{batch.place(row)} has images, and reward models see none: use a reward function")
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
    pairs = zip(prompts, completions, strict=True)
    if words.chat is not None:
        try:
            whole = [in_template(words.tokenizer, messages_of(*pair), words.chat) for pair in pairs]
        except Exception as error:
            raise DataError(f"the chat template refuses a row: {described(error)}") from error
        return [_unpadded(ids, pad) for ids in encode_texts(words.tokenizer, whole)]
    texts = [_joined(words, str(prompt), [completion]) for prompt, completion in pairs]
    coded = _tokens(words, texts)
    for row, (text, (_, parts)) in enumerate(zip(texts, coded, strict=True)):
        _check_prompt(batch.place(row), text, parts)
    return [_unpadded(ids, pad) for ids, _ in coded]


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
    version -1. A row has no room if the model could not read it and one more token, or only with other positions: it is
    returned without the images of that text. DataError for a text that the tokenizer cannot encode.
    """
    observations, images = [str(text) if text else "" for text in rows.objects("observation")], images_of(rows)
    names = [names_in(text) for text in observations]
    texts = [
        words.put(words.with_tokens(text), own, images, rows.place(row)).text
        for row, (text, own) in enumerate(zip(observations, names, strict=True))
    ]
    encoded = encode_after(words.tokenizer, [row.tolist() for row in rows.tokens], texts)
    lengths, added = rows.tokens.lengths, np.array([len(ids) for ids in encoded], np.int64)
    full = (added > 0) & (lengths + added + 1 > words.room(lengths))
    ids = [[] if no_room else row for row, no_room in zip(encoded, full.tolist(), strict=True)]

    def after(column: Ragged, new: list[list[int]], dtype: type[np.generic]) -> Ragged:
        parts = [np.concatenate([had, np.array(add, dtype)]) for had, add in zip(column, new, strict=True)]
        return Ragged.of(parts, dtype)

    if images is not None:  # each row ends with those of the new text
        kept = [own[: len(own) - no_room * len(new)] for own, new, no_room in zip(images, names, full, strict=True)]
        rows = rows.assign(images=Images(kept, images.pool))
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
    names, prompt = names_in(prompt), words.with_tokens(prompt)
    places = np.cumsum([len(prompt), *map(len, pieces)]).tolist()
    return _Text("".join([prompt, *pieces]), list(pairwise(places)), words.end, is_bare=True, names=names)


def _tokens(words: Words, texts: Sequence[_Text]) -> list[tuple[list[int], list[Run]]]:
    """Encode each text once, and return the tokens of its parts. An appended end belongs to the last part."""
    prefix = words.prefix if any(each.is_bare for each in texts) else []
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


def _with_images(words: Words, batch: Batch, texts: Sequence[_Text]) -> tuple[Batch, Sequence[_Text]]:
    """Put what stands for images into texts. The batch gets each row's images in the order of its text."""
    images = images_of(batch)
    if words.vision is None and not any(each.names for each in texts):
        return batch, texts
    whole: list[_Text] = []
    for row, each in enumerate(texts):
        text = words.put(each.text, each.names, images, batch.place(row))
        parts = [(text.place(start), text.place(end)) for start, end in each.parts]
        whole.append(each._replace(text=text.text, parts=parts))
    if images is None:
        return batch, whole
    return batch.assign(images=Images([each.names for each in texts], images.pool)), whole


def _with_tokens(words: Words, batch: Batch, texts: Sequence[_Text]) -> Batch:
    """Add the columns. Each part is learned through its first token that ends a text."""
    batch, texts = _with_images(words, batch, texts)
    tokens: list[list[int]] = []
    masks: list[NDArray[np.bool_]] = []
    for row, (text, (ids, parts)) in enumerate(zip(texts, _tokens(words, texts), strict=True)):
        mask = np.zeros(len(ids), np.bool_)
        for start, end in parts:
            stop = next((at + 1 for at in range(start, end) if ids[at] in words.ends), end)
            rest = words.tokenizer.decode([token for token in ids[stop:end] if token not in words.ends])
            if str(rest).strip():
                raise DataError(
                    f"{batch.place(row)}: {rest!r:.60} follows {words.tokenizer.decode(ids[stop - 1])!r}, which ends a "
                    "text, in what is to be learned, and a model never gets there: cut the text at its end, or give "
                    "all turns as `messages`"
                )
            mask[start:stop] = True
        words.check_row(ids, batch.place(row))
        _check_prompt(batch.place(row), text, parts)
        tokens.append(ids)
        masks.append(mask)
    return batch.assign(tokens=Ragged.of(tokens, np.int32), loss_mask=Ragged.of(masks, np.bool_))


def _check_prompt(where: str, text: _Text, parts: Sequence[Run]) -> None:
    """Raise DataError if a row's first token is learned, because the model predicts it from nothing."""
    start = text.parts[0][0]
    if parts[0][0] == 0:
        why = "has no token" if not start else "shares its only token with the completion"
        raise DataError(f"{where}: the prompt {text.text[:start]!r:.60} {why}: generation needs one to start")


class _Dialogue:
    """A dialogue as the template renders it, up to the assistant's last turn."""

    def __init__(self, words: Words, messages: Sequence[Message], where: str) -> None:
        """Raises DataError if the assistant has no turn, or if the template refuses it."""
        self._words, self._where = words, where
        self._turns = [at for at, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not self._turns:
            raise DataError(f"{where}: its dialogue has no assistant's turn to learn: drop the row")
        self._messages = messages[: self._turns[-1] + 1]
        if images_in([messages[at] for at in self._turns]):
            raise DataError(f"{where}: an assistant's message has an image, and models write none: move it to a user's")
        self._whole = self._rendered(self._messages)
        self._mark = unused(self._whole, *(str(text) for message in messages for text in message.values()))
        self._places: dict[tuple[int, str], Run | None] = {}

    def text(self, *, only_last: bool = False) -> _Text:
        """Return the row. DataError if the template leaves out a part of an earlier turn that is learned."""
        *earlier, last = self._turns
        found = [self._turn(at) for at in (() if only_last else earlier)]
        part = self._turn(last)
        whole, end = self._whole, None
        if part is None:
            whole, part, end = self._continued()
        elif not part[2]:
            whole, end = whole[: part[1]], self._words.end
        for at, each in zip(earlier, found, strict=False):
            if each is None or not whole.startswith(self._whole[: each[1]]):
                raise self._left_out(at)
        parts = [(start, stop) for start, stop, _ in (*filter(None, found), part)]
        return _Text(whole, parts, end, names=images_in(self._messages))

    def _left_out(self, at: int, name: str = "content") -> DataError:
        return DataError(
            f"{self._where}: the chat template of {self._words.tokenizer.name_or_path or 'this model'} leaves out a "
            f"part of message {at}, {self._messages[at][name]!r:.60}, or rewrites it, so the turn cannot be learned. "
            "Templates that drop the thoughts of earlier turns do so: learn 'last', or give each turn as a separate row"
        )

    def _continued(self) -> tuple[str, tuple[int, int, bool], int | None]:
        """Append the last turn to its prompt, and return the text, the turn in it, and the token to append.

        A tag that the prompt opens, such as that of thoughts, is not repeated. DataError for a turn with other parts.
        """
        *before, message = self._messages
        for name in message.keys() - {"role", "content"}:  # such as a call of a tool, which no text says
            if message[name] and (not isinstance(cast("object", message[name]), str) or self._place(len(before), name)):
                raise self._left_out(len(before))
        prompt, content = self._rendered(before, opens=True), message["content"]
        tag = opened_tag(prompt).strip()
        if tag and content.lstrip().startswith(tag):
            content = content.lstrip().removeprefix(tag).lstrip("\n")
        closing, end = self._words.closing
        text = prompt + content + closing
        return text, (len(prompt), len(text), bool(closing)), self._words.end if end is None else None

    def _turn(self, at: int) -> tuple[int, int, bool] | None:
        """Return from which character to which a turn is, and whether a token ends it.

        None if its content, or only the beginning of it, is left out, such as thoughts. DataError if another part is.
        """
        messages, whole = self._messages, self._whole
        opened, content = self._rendered(messages[:at], opens=True), messages[at]["content"].strip()
        start, limit = len(opened), len(whole)
        if whole.startswith(opened + content):
            shown = start, start + len(content)
        elif (found := self._place(at)) is None:
            if self._with(at, "content", self._mark) == whole:  # a template of prompts alone
                return None
            raise self._left_out(at)
        else:
            shown = found
            start = start if whole.startswith(opened) else self._opening(at, opened, shown[0])
        if at + 1 < len(messages) and (after := self._place(at + 1)):
            limit = after[0]
        ends = [(whole.find(text, shown[1], limit), text) for text in self._words.end_texts]
        place, end = min(((place, text) for place, text in ends if place >= 0), default=(shown[1], ""))
        stop = place + len(end)
        others = [name for name, value in messages[at].items() if value and name not in {"role", "content"}]
        if others and not whole[start:place].strip():  # such as calls, of which the template knows nothing
            raise self._left_out(at, others[0])
        texts = {name: text for name, text in messages[at].items() if isinstance(cast("object", text), str)}
        missing = {name for name, text in texts.items() if name != "role" and not _has(whole[start:stop], text)}
        if missing:  # the prompt may open a part of it
            turn = whole[self._end_before(at) : stop]
            missing = {name for name in missing if not _has(turn, texts[name]) and self._is_cut(at, name)}
        return None if missing else (start, stop, bool(end))

    def _is_cut(self, at: int, name: str) -> bool:
        """True if the template shows the end of a text. False if it writes the text with other characters.

        DataError if it leaves out another part.
        """
        text, place = self._messages[at][name], self._place(at, name)
        if place is None:  # also a key that the template does not know
            if name == "content" or self._mark in self._with(at, name, self._mark, at + 1):
                raise self._left_out(at, name)
            return False
        own, shown = _squeezed(text), _squeezed(self._whole[slice(*place)])
        cut = [number for number, each in enumerate(text) if each.strip()][max(0, len(own) - len(shown)) // 2]
        begins, middle, ends = (
            self._mark in self._with(at, name, f"{text[:number]}{self._mark}{text[number:]}")
            for number in (0, cut, len(text))
        )
        if name == "content" and own.endswith(shown) and not (begins and middle):
            return True
        if _is_within(shown, own) or not (begins and ends):
            raise self._left_out(at, name)
        return False

    def _opening(self, at: int, opened: str, begin: int) -> int:
        """Return where a turn starts whose prompt is rendered differently without it: after what opens it, if found."""
        opening = opened[alike(opened, self._rendered(self._messages[:at])) :]
        for size in range(len(opening), 0, -1):
            place = self._whole.rfind(opening[:size], self._end_before(at), begin)
            if place >= 0:
                return place + size
        return begin

    def _end_before(self, at: int) -> int:
        """Return where the content of the message before a turn ends."""
        place = self._place(at - 1) if at else None
        return place[1] if place else 0

    def _place(self, at: int, name: str = "content") -> Run | None:
        """Return from which character to which a message's text is. None if it is nowhere."""
        if (at, name) not in self._places:
            before, found, _ = (marked := self._with(at, name, self._mark)).partition(self._mark)
            start, after = alike(self._whole, before), marked.rpartition(self._mark)[2]
            end = max(start, len(self._whole) - alike(self._whole[::-1], after[::-1]))
            self._places[at, name] = (start, end) if found else None
        return self._places[at, name]

    def _with(self, at: int, name: str, text: str, until: int | None = None) -> str:
        """Render the dialogue, or only messages `until` one, with another text in a message."""
        messages = [*self._messages[:until]]
        messages[at] = {**messages[at], name: text}
        return self._rendered(messages)

    def _rendered(self, messages: Sequence[Message], *, opens: bool = False) -> str:
        try:
            return in_template(self._words.tokenizer, messages, self._words.chat or {}, opens=opens)
        except Exception as error:
            raise DataError(f"{self._where}: the chat template refuses it: {described(error)}") from error


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _has(whole: str, part: str) -> bool:
    return _squeezed(part) in _squeezed(whole)


def _is_within(shown: str, own: str) -> bool:
    """True if a text is another one without some characters."""
    rest = iter(own)
    return all(each in rest for each in shown)
