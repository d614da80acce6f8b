"""The text of each token of a row, by the tokenizer's file alone where there is one: torch is not loaded for it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from tokenizers import Tokenizer

from meshrl.errors import ModelError, described
from meshrl.roles import ModelConfig, NewModel

Tokens: TypeAlias = list[int]
Decode: TypeAlias = Callable[[list[Tokens]], Sequence[str]]

_BYTES: Final = 4
"""Bytes of a character at most, and so the tokens that it can have."""
_BROKEN: Final = "\ufffd"
"""What stands for bytes that are no whole character."""


def read_texts(config: ModelConfig) -> Callable[[Sequence[Sequence[int]]], list[list[str]]]:
    """Return a function from rows of tokens to the text that each token adds. ModelError without a tokenizer."""
    decode = _decoder(config)
    return lambda rows: [token_texts(decode, row) for row in rows]


def _decoder(config: ModelConfig) -> Decode:
    """Return a function that decodes rows, special tokens by name."""
    if isinstance(config.model, NewModel):
        known = ("<pad>", "<eos>", *config.model.characters)
        return lambda rows: ["".join(known[token] for token in row) for row in rows]
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        from meshrl_torch.model.loading import folder_of  # noqa: PLC0415 -- it loads torch

        folder = folder_of(config.model)
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ModelError(f"{file} cannot be read: {described(error)}") from error
        return lambda rows: tokenizer.decode_batch(rows, skip_special_tokens=False)
    from meshrl_torch.model.loading import read_tokenizer  # noqa: PLC0415 -- as above

    slow = read_tokenizer(config.model, folder)
    return lambda rows: [str(slow.decode(row, skip_special_tokens=False)) for row in rows]


def token_texts(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds, special ones by name. Joined, they are the text of the row.

    A character of several tokens is the text of the last of them, and the others have none.
    """
    is_open = [
        text.endswith(_BROKEN)
        for text in decode([[*tokens[max(0, at - _BYTES) : at + 1]] for at in range(len(tokens))])
    ]
    old: list[Tokens] = []
    new: list[Tokens] = []
    before = begin = 0  # ends of the last two whole texts
    for at in range(len(tokens)):
        begin = max(begin, at - 2 * _BYTES)  # bytes that never become a character
        old.append([*tokens[begin : max(begin, before)]])
        new.append([*tokens[begin : at + 1]])
        if not is_open[at]:
            before, begin = at + 1, before
    added = [whole[len(known) :] for known, whole in zip(decode(old), decode(new), strict=True)]
    return ["" if is_open[at] and at + 1 < len(added) else text for at, text in enumerate(added)]
