"""Text to tokens and back, in one way for all roles: prompts, parts of rows, ends, and the character tokenizer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BatchEncoding,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from meshrl.data import Batch, Images, Message, Prompt, mark_of, names_in, pieces_of, prompt_in
from meshrl.errors import ConfigError, DataError, ModelError, did_you_mean
from meshrl.roles import Sampling
from meshrl_torch.model.positions import ANY, native_tokens
from meshrl_torch.model.vision import FilledText, Vision

PAD: Final = 0
END: Final = 1
"""The tokens of a character tokenizer that are not characters."""
Template: TypeAlias = Mapping[str, JsonValue]
"""Variables of a chat template, by name."""
Run: TypeAlias = tuple[int, int]
"""From which token or character to which, without the last."""
ASSISTANT: Final = "assistant"


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
    native_tokens: int = field(default=ANY, kw_only=True)
    """The longest row with native positions. Longer ones have others from their first token on, as in LongRoPE."""
    known: int = field(kw_only=True)
    """Number of token embeddings."""
    vision: Vision | None = field(default=None, kw_only=True)
    """How it sees images. None: it does not, or has no processor of images."""

    @cached_property
    def end(self) -> int:
        """The token that ends a text without a template."""
        own = self.tokenizer.eos_token_id
        return own if isinstance(own, int) else min(self.ends)

    @cached_property
    def prefix(self) -> list[int]:
        """The tokens that the tokenizer puts before a text."""
        return prefix_of(self.tokenizer)

    @cached_property
    def heading(self) -> str | None:
        """What the chat template puts before an assistant's message. None if there is none, or no such message."""
        return around_message(self.tokenizer, self.chat or {})[0] or None

    @cached_property
    def closing(self) -> tuple[str, int | None]:
        """What the chat template closes an assistant's turn with. See `turn_end`."""
        return turn_end(self.tokenizer, self.chat or {})

    @cached_property
    def end_texts(self) -> Sequence[str]:
        """The ends as a text has them."""
        return [text for text, token in added_tokens(self.tokenizer).items() if token in self.ends]

    def stops(self, sampling: Sampling) -> frozenset[int]:
        """Return the tokens that end a row: the ends, those of `stop_tokens` and `stop_ids`, and those `stop` names.

        DataError if the tokenizer does not have one of `stop_tokens`.
        """
        tokenizer, added = self.tokenizer, added_tokens(self.tokenizer)
        named = {name: cast("int | None", tokenizer.convert_tokens_to_ids(name)) for name in sampling.stop_tokens}
        for name, token in named.items():
            if token is None or tokenizer.convert_ids_to_tokens(token) != name:
                raise DataError(
                    f"sampling.stop_tokens: the tokenizer of {tokenizer.name_or_path or 'this model'} has no token "
                    f"{name!r}. {did_you_mean(name, added)} A text of several tokens belongs into sampling.stop"
                )
        own = frozenset[int]() if sampling.ignore_eos else self.ends
        if self.vision is not None:
            own |= {self.vision.token}  # in the middle of a row it would stand for an image
        return (
            own
            | {*sampling.stop_ids}
            | {token for token in named.values() if token is not None}
            | {added[text] for text in sampling.stop if text in added}
        )

    def put(self, text: str, names: Sequence[str], images: Images | None, where: str) -> FilledText:
        """Put what stands for images into a rendered text. DataError if the model does not see, or they do not fit."""
        if self.vision is not None:
            return self.vision.put(text, names, images or Images((), {}), where)
        if names:
            raise DataError(
                f"{where}: the text names images, and {self.tokenizer.name_or_path or 'this model'} sees none, or its "
                "folder has no processor_config.json or preprocessor_config.json: choose a vision-language model"
            )
        return FilledText(text, ())

    def with_tokens(self, text: str) -> str:
        """Return a text that no template renders, with the processor's token for each image that it names."""
        names = names_in(text)
        if not names or self.vision is None:
            return text
        token = str(self.vision.processor.image_token)
        for name in names:
            text = text.replace(mark_of(name), token)
        return text

    def room(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how long rows that take several turns may get: those with native positions keep them."""
        return np.where(lengths <= self.native_tokens, min(self.native_tokens, self.max_tokens), self.max_tokens)

    def check_lengths(self, longest: int, what: str) -> None:
        """Raise DataError if a sequence is longer than the model supports."""
        if longest > self.max_tokens:
            raise DataError(
                f"{what} has {longest} tokens and the model takes at most {self.max_tokens}: shorten the row, or "
                "choose a model for longer texts"
            )

    def check_row(self, ids: Sequence[int], where: str) -> None:
        """Raise DataError if the model cannot read a row of tokens: it is too long, or has an unknown one."""
        self.check_lengths(len(ids), where)
        self.check_known(ids, where)

    def check_known(self, ids: Sequence[int], where: str) -> None:
        """Raise DataError if the model has no embedding of a token."""
        if ids and not 0 <= min(ids) <= max(ids) < self.known:
            alien = next(token for token in ids if not 0 <= token < self.known)
            text = self.tokenizer.convert_ids_to_tokens(alien) if alien > 0 else None
            name = "" if text is None else f" ({text})"
            raise DataError(
                f"{where} has the token {alien}{name} and the model knows 0 to {self.known - 1}: "
                "use the model's own tokenizer, or a model with an embedding of this token"
            )


def words(
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    generation: GenerationConfig | None,
    chat: Template | None,
    vision: Vision | None = None,
) -> Words:
    """Read a tokenizer and configurations. ModelError if no token ends a text, or without a template for `chat`.

    The ends are those of the generation's configuration and of the tokenizer, and what closes an assistant's turn in
    the chat template.
    """
    given = None if generation is None else generation.eos_token_id
    _, closing = turn_end(tokenizer, chat or {})
    named = [*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id, closing]
    ends = frozenset(token for token in named if isinstance(token, int))
    shape = config.get_text_config()
    longest = getattr(shape, "max_position_embeddings", None)
    name = tokenizer.name_or_path or "this model"
    if chat is not None and not tokenizer.chat_template:
        raise ModelError(
            f"chat = true, but the tokenizer of {name} has no chat template: use an instruction-tuned model, or "
            "chat = false"
        )
    if not any(token < shape.vocab_size for token in ends):
        beyond = f"the model has {shape.vocab_size} tokens, and the ends are {sorted(ends)}"
        raise ModelError(
            f"no completion of {name} could end: {beyond if ends else 'its tokenizer has no end-of-text token'}. Set "
            "eos_token in its tokenizer_config.json to a token of the model"
        )
    return Words(
        tokenizer,
        chat,
        ends,
        int(longest or (1 << 62)),
        native_tokens=native_tokens(shape),
        known=shape.vocab_size,
        vision=vision,
    )


def around_message(
    tokenizer: PreTrainedTokenizerBase, variables: Template, *later: Mapping[str, object]
) -> tuple[str, str]:
    """Return what the chat template puts before and after an assistant's message, "" if it has none.

    `later`: messages after it.
    """
    mark = unused(str(tokenizer.chat_template), *map(str, variables.values()))
    turns = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": mark}, *later]
    try:
        text = in_template(tokenizer, turns, variables) if tokenizer.chat_template else ""
    except Exception:  # noqa: BLE001 -- a template may raise anything, and may want other messages
        text = ""
    before, found, _ = text.partition(mark)
    return (before, text.rpartition(mark)[2]) if found else ("", "")


def unused(*texts: str) -> str:
    """Return a character that no text has. It stands for a message's text, to see where a template puts that."""
    return next(each for each in map(chr, range(0xE000, 0xF900)) if not any(each in text for text in texts))


def turn_end(tokenizer: PreTrainedTokenizerBase, variables: Template) -> tuple[str, int | None]:
    """Return what the chat template closes an assistant's turn with, and its last token. "" and None if with none.

    A text may precede its tokens. If it closes the last turn with more tokens than an earlier one, such as the end of a
    dialogue, those are left out.
    """
    tokens, tail = added_tokens(tokenizer), around_message(tokenizer, variables)[1]
    earlier = around_message(tokenizer, variables, {"role": "user", "content": "a"})[1]
    for closing in (tail[: alike(tail, earlier)], tail):
        places = [place for text in tokens if text and (place := closing.find(text)) >= 0]
        rest, end = closing[min(places, default=len(closing)) :], None
        while found := [text for text in tokens if text and rest.lstrip().startswith(text)]:
            end = max(found, key=len)
            rest = rest.lstrip().removeprefix(end)
        if end is not None:
            return closing.removesuffix(rest), tokens[end]
    return "", None


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, int]:
    """Return the special tokens, and others that are whole texts, with their numbers."""
    return cast("Mapping[str, int]", tokenizer.added_tokens_encoder)


def character_tokenizer(
    characters: str, max_tokens: int, chat_template: str | None = None, named: Mapping[str, str] | None = None
) -> PreTrainedTokenizerBase:
    """Make a tokenizer with one token for each character, after `<pad>` (PAD) and `<eos>` (END). No BOS token.

    `named`: special tokens by their names, such as `image_token`.
    """
    twice = sorted({character for character in characters if characters.count(character) > 1})
    if twice or not characters:
        wrong = f"has {''.join(twice)!r} twice" if twice else "is empty"
        raise ConfigError(f"model.characters {wrong}: list each character that a text may have exactly once")
    vocabulary = {token: index for index, token in enumerate(("<pad>", "<eos>", *characters, *(named or {}).values()))}
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
        **({"extra_special_tokens": dict(named)} if named else {}),
    )


def encode_prompts(
    words: Words, prompts: Sequence[Prompt], images: Images | None = None, places: Sequence[str] = ()
) -> list[list[int]]:
    """Encode each prompt as generation starts from it, after the tokenizer's prefix.

    With `chat`, each prompt is one user message in the tokenizer's template, or the messages that it has. `images`: of
    all prompts. `places`: their names in errors. DataError for a prompt without tokens, or one that cannot be encoded.
    """
    tokenizer, chat = words.tokenizer, words.chat
    if chat is None:
        texts = [words.with_tokens(str(prompt)) for prompt in prompts]
    else:
        texts = [in_template(tokenizer, messages_of(prompt), chat, opens=True) for prompt in prompts]
    named = [images_in(messages_of(prompt)) for prompt in prompts]
    where = places or [f"prompt {number}" for number in range(len(prompts))]
    texts = [words.put(*each[:2], images, each[2]).text for each in zip(texts, named, where, strict=True)]
    tokens = encode_texts(tokenizer, texts)
    if chat is None and (prefix := words.prefix):
        tokens = [ids if ids[: len(prefix)] == prefix else [*prefix, *ids] for ids in tokens]
    for prompt, ids in zip(prompts, tokens, strict=True):
        if not ids:
            raise DataError(f"the prompt {prompt!r} has no token: generation needs one to start")
    return tokens


def prefix_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before a text. What it puts after one, such as EOS, ends the text."""
    for text in ("a", *sorted(text for text in tokenizer.get_vocab() if len(text) == 1)):
        try:
            (body, whole) = (list(tokenizer(text, add_special_tokens=each)["input_ids"]) for each in (False, True))
        except Exception:  # noqa: BLE001, S112 -- a tokenizer of few characters raises what it likes
            continue
        if not body:
            continue
        starts = range(len(whole) - len(body) + 1)
        return next((whole[:at] for at in starts if whole[at : at + len(body)] == body), [])
    return []


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Encode rendered texts, with nothing before or after them. DataError for texts that it cannot encode."""
    return list(_coded(tokenizer, texts)["input_ids"]) if texts else []


def encode_parts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], parts: Sequence[Sequence[Run]]
) -> list[tuple[list[int], list[Run]]]:
    """Encode each text once, and return the tokens of each of its parts, which are runs of characters.

    A token on the border of two parts belongs to both. DataError for texts that it cannot encode.
    """
    if not texts:
        return []
    if tokenizer.is_fast:
        coded, added = _coded(tokenizer, texts, offsets=True), tokenizer.added_tokens_decoder
        taking = [token for token, each in added.items() if each.lstrip or each.rstrip]
        offsets = [np.array(each, np.int64).reshape(-1, 2) for each in coded["offset_mapping"]]
        for text, ids, at in zip(texts, coded["input_ids"], offsets, strict=True):
            for token in np.flatnonzero(np.isin(ids, taking)).tolist():  # the spaces that a token takes are of no part
                taken = text[slice(*at[token])]
                at[token] += len(taken) - len(taken.lstrip()), len(taken.rstrip()) - len(taken)
        runs = [
            [(int((at[:, 1] <= start).sum()), int((at[:, 0] < end).sum())) for start, end in own]
            for at, own in zip(offsets, parts, strict=True)
        ]
        return list(zip(coded["input_ids"], runs, strict=True))
    rows: list[tuple[list[int], list[Run]]] = []
    for text, own, ids in zip(texts, parts, encode_texts(tokenizer, texts), strict=True):
        until = {len(text): len(ids)}  # the tokens that a beginning of the text has too
        for place in {place for part in own for place in part} - until.keys():
            until[place] = alike(ids, encode_texts(tokenizer, [text[:place]])[0])
        rows.append((ids, [(until[start], until[end]) for start, end in own]))
    return rows


def alike(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many characters or tokens two beginnings share."""
    if one[: len(other)] == other:
        return len(other)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def encode_after(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Sequence[int]], texts: Sequence[str]
) -> list[list[int]]:
    """Encode texts that continue rows of tokens: without the space that some tokenizers put before a text."""
    found: list[list[int]] = []
    lasts = [tokenizer.decode(list(row[-1:]), skip_special_tokens=False) for row in rows]
    for last, text in zip(lasts, texts, strict=True):
        for before in (str(last), "\n") if last and text else ():
            parts = [(0, len(before)), (len(before), len(before) + len(text))]
            ((ids, (old, new)),) = encode_parts(tokenizer, [before + text], [parts])
            if old[1] == new[0]:  # otherwise a token has parts of both
                found.append(ids[new[0] :])
                break
        else:
            found += encode_texts(tokenizer, [text])
    return found


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
    listed = _reads_lists(tokenizer)
    turns: list[Any] = [_as_parts(message, listed) for message in messages]
    if tools:
        given["tools"] = [dict(tool) for tool in tools]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=opens, **given)
    return str(text)


def _as_parts(message: Mapping[str, object], listed: bool) -> dict[str, object]:
    """Return a message with its content as a list of parts if it has images, or if the template reads only lists."""
    content = message.get("content")
    if not isinstance(content, str) or not (listed or names_in(content)):
        return dict(message)
    parts = [
        {"type": "image"} if is_image else {"type": "text", "text": piece} for piece, is_image in pieces_of(content)
    ]
    return {**message, "content": parts or [{"type": "text", "text": ""}]}


_listed: Final[dict[str, bool]] = {}
"""Of each template, whether it reads only lists."""


def _reads_lists(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if a chat template leaves out the content of a message that is a text, and not that of a list of parts."""
    template = str(tokenizer.chat_template)
    if template not in _listed:
        mark, found = unused(template), list[bool]()
        for content in (mark, [{"type": "text", "text": mark}]):
            message: Any = {"role": "user", "content": content}
            try:
                text = tokenizer.apply_chat_template([message], tokenize=False)
                found.append(mark in str(text) and "'type'" not in str(text))
            except Exception:  # noqa: BLE001 -- a template may raise anything
                found.append(False)
        _listed[template] = found == [False, True]
    return _listed[template]


def images_in(messages: Sequence[Message]) -> list[str]:
    """Return the names of the images in messages, in order."""
    return [name for message in messages for name in names_in(str(message.get("content", "")))]


def texts_of(batch: Batch, name: str) -> list[str]:
    """Return a column of texts. DataError if a value is not text."""
    values = batch.objects(name) if len(batch) else ()
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(f"`{name}` of {batch.place(row)} is {value!r} ({type(value).__name__}), not text")
    return [str(value) for value in values]


def prompts_of(batch: Batch, chat: Template | None) -> list[Prompt]:
    """Return the prompts. With `chat` they may be lists of messages. DataError for others."""
    values = batch.objects("prompt") if len(batch) else ()
    prompts: list[Prompt] = []
    for row, value in enumerate(values):
        if not isinstance(value, str | Sequence):
            raise DataError(f"`prompt` of {batch.place(row)} is {value!r} ({type(value).__name__}), not text")
        prompts.append(prompt_in(value, f"{batch.place(row)}: `prompt`"))
        if chat is None and not isinstance(value, str):
            raise DataError(
                f"{batch.place(row)}: the prompt is a list of messages, which a chat template renders: set chat = true"
            )
    return prompts


def messages_of(prompt: Prompt, completion: str | None = None) -> list[Message]:
    """Return a prompt as messages, a text as the user's, and its completion as the assistant's."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*before, *([] if completion is None else [{"role": ASSISTANT, "content": completion}])]


def _coded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, offsets: bool = False) -> BatchEncoding:
    try:
        coded: BatchEncoding = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=offsets)
    except Exception as error:
        known = {token for token in tokenizer.get_vocab() if len(token) == 1}
        for text in texts:
            bare = text
            for token in tokenizer.all_special_tokens:
                bare = bare.replace(token, "")
            if strange := sorted(set(bare) - known):
                remedy = "take a model that knows them" if tokenizer.name_or_path else "add to model.characters"
                raise DataError(
                    f"the text {_short(text)!r} has {', '.join(map(repr, strange))}, which the tokenizer does "
                    f"not know; its characters are {''.join(sorted(known))!r}: {remedy}, or clean the text"
                ) from error
        raise DataError(f"the tokenizer cannot encode {_short(texts[0])!r}...: {error}") from error
    return coded


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
