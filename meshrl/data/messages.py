"""Prompts: a text, or the messages that come before the assistant's, which a chat template renders."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

from meshrl.data.images import shown
from meshrl.errors import DataError, shortened

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[Message]


def messages_in(value: object, where: str) -> Sequence[Message]:
    """Return a list of messages. DataError, which names `where`, if it is none, or if its contents are not texts."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where} is {shortened(value)}: give a list of {{'role': ..., 'content': ...}}")
    for at, message in enumerate(value):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise DataError(
                f"{where}: message {at} is {shortened(message)}: give {{'role': ..., 'content': ...}}, both texts. "
                "Parts that are images need task.images, and calls of tools without a text are not supported"
            )
    # Parquet fills the keys of other messages in with null, which templates take for given.
    messages = cast("Sequence[Mapping[str, str | None]]", value)
    return [{key: each for key, each in message.items() if each is not None} for message in messages]


def prompt_in(value: object, where: str) -> Prompt:
    """Return a prompt. DataError, which names `where`, if it is none, or if the assistant has the last message."""
    if isinstance(value, str):
        return value
    messages = messages_in(value, where)
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{where} ends with an assistant's message, {shortened(messages[-1]['content'])}, but the model's own "
            "comes next: leave it out, or make it the row's answer"
        )
    return messages


def prompt_text(prompt: object) -> object:
    """Return a prompt as a text to show, with short names of images. Other values stay as they are."""
    if isinstance(prompt, str):
        return shown(prompt)
    if not isinstance(prompt, Sequence):
        return prompt
    return shown("\n\n".join(f"{each['role']}: {each['content']}" for each in cast("Sequence[Message]", prompt)))
