"""Checks of a model's tokenizer before the model loads: lengths of prompts, and whether a teacher's tokens agree."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from meshrl.errors import ConfigError
from meshrl.roles.config import ModelConfig, NewModel, PolicyConfig
from meshrl.roles.registry import function_of

_CHARACTERS_AFTER: Final = ("<pad>", "<eos>")
"""The tokens before the characters in a new model's tokenizer."""


def count_tokens(config: ModelConfig, prompts: Sequence[str]) -> Sequence[int | str] | None:
    """Count the tokens of each prompt as generation starts, or say why a prompt cannot be read. None if unknown.

    Reads only the model's tokenizer. Raises ModelError if it cannot be read.
    """
    count = function_of(config.backend, "COUNTS")
    if count is None:
        return None
    return cast("Callable[[ModelConfig, Sequence[str]], Sequence[int | str] | None]", count)(config, prompts)


def check_teacher(policy: PolicyConfig, teacher: ModelConfig) -> None:
    """Check a teacher: raise ConfigError if it is the policy's model, or if its tokens differ from the policy's.

    Reads the `tokenizer.json` of local folders before any model loads. Models without one, such as .gguf files, are not
    checked.
    """
    if policy.model == teacher.model:
        raise ConfigError(
            f"the teacher's model, {_named(teacher.model)}, is the policy's model, so there is nothing to learn from "
            "it: name the folder of a better model"
        )
    one, other = _vocabulary(policy.model), _vocabulary(teacher.model)
    if one is None or other is None:
        return
    apart = sorted((token for token in one if other.get(token) != one[token]), key=one.__getitem__)
    if apart or len(one) != len(other):
        token = apart[0] if apart else next(token for token in other if token not in one)
        raise ConfigError(
            f"the teacher's model, {_named(teacher.model)}, has other tokens than the policy's, "
            f"{_named(policy.model)}: {token!r} is token {one.get(token, 'none')} of the policy and "
            f"{other.get(token, 'none')} of the teacher ({len(one)} and {len(other)} tokens, {len(apart)} of the "
            "policy's differ). A teacher reads the policy's tokens, so choose a model of the same family"
        )


def _named(model: str | NewModel) -> str:
    return repr(model) if isinstance(model, str) else "a new one"


def _vocabulary(model: str | NewModel) -> Mapping[str, int] | None:
    """Return the number of each token, or None if it cannot be read here."""
    if isinstance(model, NewModel):
        return {token: number for number, token in enumerate((*_CHARACTERS_AFTER, *model.characters))}
    file = Path(model).expanduser() / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        table = cast("dict[str, Any]", json.loads(file.read_bytes()))
        pieces = table["model"]["vocab"]
        numbered = pieces if isinstance(pieces, dict) else {piece[0]: number for number, piece in enumerate(pieces)}
        added = {token["content"]: token["id"] for token in table.get("added_tokens", ())}
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: is not a readable tokenizer: {type(error).__name__}: {error}") from error
    return {**cast("dict[str, int]", numbered), **added}
