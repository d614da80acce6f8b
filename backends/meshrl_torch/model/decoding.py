"""Decodes tokens into the texts that rewards, stop texts, environments and agents get."""

from collections.abc import Collection, Sequence
from typing import Final, cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from meshrl.tags import opened_tag
from meshrl_torch.model.text import Words, added_tokens, encode_texts

TAIL: Final = 16
"""Tokens in which the tag that a prompt ends with is."""


def completion_texts(
    words: Words,
    rows: Sequence[Sequence[int]],
    before: Sequence[Sequence[int]],
    ends: Collection[int] = (),
    stop: Sequence[str] = (),
) -> list[str]:
    """Decode the completion after the tokens `before` each row, up to a stop text.

    Padding, the tokens that end a text, and `ends` have no text. A stop text may name them.
    """
    silent = {*words.ends, *ends, cast("int | None", words.tokenizer.pad_token_id)}
    texts = decode(words, [[token for token in row if token not in silent] for row in rows], before)
    names = [text for text, token in added_tokens(words.tokenizer).items() if token in silent]
    for row, text in enumerate(decode(words, rows, before) if stop else ()):
        if places := [place for each in stop if (place := text.find(each)) >= 0]:
            texts[row] = text[: min(places)]
            for name in names:
                texts[row] = texts[row].replace(name, "")
    return texts


def decode(words: Words, rows: Sequence[Sequence[int]], before: Sequence[Sequence[int]]) -> list[str]:
    """Decode each row of tokens, special ones by name, as a text that continues the tokens `before` it."""
    tokenizer = words.tokenizer
    heads = [list(tokens[-1:]) for tokens in before]
    kept = [[*head, *row] for row, head in zip(rows, heads, strict=True)]
    texts: list[str] = []
    has_space: dict[str, bool] = {}
    for text, head in zip(_decoded(tokenizer, kept), _decoded(tokenizer, heads), strict=True):
        begun = text[len(head) :]
        # Some tokenizers put a space between what is before and any text: it is theirs.
        if begun.startswith(" ") and begun[1:2].strip() and head not in has_space:
            (ids,) = encode_texts(tokenizer, [head + begun[1]])
            has_space[head] = _decoded(tokenizer, [ids])[0].endswith(begun[:2])
        texts.append(begun[1:] if begun.startswith(" ") and has_space.get(head) else begun)
    return texts


def opened_in(words: Words, prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> list[str]:
    """Return the tag that the chat template opens at the end of each prompt, such as `<think>`, or "".

    It belongs to what the model says. `texts`: the prompts as their rows have them. A tag that is there is not opened.
    """
    if words.heading is None:
        return [""] * len(prompts)
    tails = [list(prompt[-TAIL:]) for prompt in prompts]
    known: dict[str, str] = {}
    found = (
        known[tail] if tail in known else known.setdefault(tail, _opened(words.heading, tail))
        for tail in _decoded(words.tokenizer, tails)
    )
    return ["" if tag and text.endswith(tag) else tag for tag, text in zip(found, texts, strict=True)]


def _opened(heading: str, tail: str) -> str:
    tag = opened_tag(tail)
    name = tag.strip()
    # A tag that the template opens before a message too, and does not close, opens the turn and no thought.
    return "" if name in heading and f"{name[:1]}/{name[1:]}" not in heading else tag


def reach_of(stop: Sequence[str]) -> int:
    """Return the number of tokens, up to the newest, that may be part of a stop text that it completes."""
    return 4 * max(map(len, stop)) + 4  # a character has at most four bytes, and a token at least one


def stopped_after(words: Words, tokens: Sequence[int], start: int, begun: int, stop: Sequence[str]) -> int | None:
    """Return the number of tokens after which a stop text is complete. None if never.

    A completion begins at `start`, and has no stop text up to `begun`.
    """
    (whole,) = decode(words, [tokens[start:]], [tokens[:start]])
    if not any(each in whole for each in stop):
        return None
    reach = reach_of(stop)
    begins = [max(start, end - reach) for end in range(begun + 1, len(tokens) + 1)]
    windows = [tokens[begin:end] for end, begin in enumerate(begins, begun + 1)]
    texts = decode(words, windows, [tokens[max(0, begin - 1) : begin] for begin in begins])
    return next((end for end, text in enumerate(texts, begun + 1) if any(each in text for each in stop)), None)


def _decoded(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    if isinstance(tokenizer, PreTrainedTokenizerFast):  # one call for all rows: twice as fast
        return tokenizer.backend_tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=False)
    return [str(tokenizer.decode(list(row), skip_special_tokens=False)) for row in rows]
