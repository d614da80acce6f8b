"""Pairs with a better text, and texts labelled good or bad, made from a task's rows."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.tasks.task import fill

if TYPE_CHECKING:
    from meshrl.tasks.sources import Row


def answer_pairs(batch: Batch, others: Sequence[object]) -> Batch:
    """Each row twice: with its `answer` as the completion, which is preferred, and with its text of `others`.

    Adds `completion`, `preferred` (int8: 1, then -1; 0 for both where the texts are equal), and `groups` where there
    are none. DataError where there is not one text for each row.
    """
    answers = cast("tuple[str, ...]", batch.objects("answer"))
    if len(answers) != len(others):
        raise DataError(f"answer_pairs: {len(answers)} rows and {len(others)} other texts: give one for each row")
    different = np.array([answer != other for answer, other in zip(answers, others, strict=True)], np.int8)
    texts = [text for pair in zip(answers, others, strict=True) for text in pair]
    if "groups" not in batch:
        batch = batch.assign(groups=np.arange(len(batch)))
    preferred = np.repeat(different, 2) * np.tile(np.array([1, -1], np.int8), len(answers))
    return batch.repeat(2).assign(completion=texts, preferred=preferred)


def rejected_answers(batch: Batch, template: str) -> list[str]:
    """What each row's answer is better than: the template filled from its `row`; with no template, `corrupted`.

    Raises DataError where a row lacks what the template needs.
    """
    if template:
        rows = cast("tuple[Row, ...]", batch.objects("row"))
        return [fill(template, row, "rejected") for row in rows]
    return [corrupted(str(answer), str(prompt)) for answer, prompt in _texts(batch)]


def labelled(batch: Batch, label: str) -> Batch:
    """Each row with its `answer` as the completion, and whether that is `desirable`, bool: what `row[label]` says.

    With no label, about every second row's completion is `corrupted`, and those are not desirable: data to try things
    on. DataError where a row lacks the label or it is neither true nor false.
    """
    if not label:
        desirable = np.array([about_half(f"label {prompt}") for _, prompt in _texts(batch)], np.bool_)
        texts = [
            str(answer) if good else corrupted(str(answer), str(prompt))
            for good, (answer, prompt) in zip(desirable, _texts(batch), strict=True)
        ]
        return batch.assign(completion=texts, desirable=desirable)
    labels = [cast("Row", row).get(label) for row in batch.objects("row")]
    for number, value in enumerate(labels):
        if not isinstance(value, bool):
            raise DataError(
                f"row {number} has {label} = {value!r}: a label is true where the completion is good and false where "
                "it is bad; name its key with `label`"
            )
    return batch.assign(completion=batch.objects("answer"), desirable=np.array(labels, np.bool_))


def mismatched(batch: Batch) -> Batch:
    """Each `prompt` with the next row's `completion`, and the last with the first's: these two columns alone."""
    texts = batch.objects("completion")
    return batch.only("prompt").assign(completion=[*texts[1:], *texts[:1]])


def corrupted(answer: str, key: str) -> str:
    """The answer with two neighbouring characters that differ exchanged, which ones is decided by `key`.

    Where no neighbours differ, without its last character.
    """
    places = [place for place in range(len(answer) - 1) if answer[place] != answer[place + 1]]
    if not places:
        return answer[:-1]
    at = places[_hash(key) % len(places)]
    return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]


def about_half(key: str) -> bool:
    """True of about every second text, by the text alone."""
    return _hash(key) % 2 == 0


def _texts(batch: Batch) -> list[tuple[object, object]]:
    return list(zip(batch.objects("answer"), batch.objects("prompt"), strict=True))


def _hash(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
