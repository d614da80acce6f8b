"""Preference pairs of texts, and texts labelled good or bad, made from a task's rows."""

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
    """Make a pair of each row: its `answer` as the preferred completion, and its text in `others`.

    Adds `completion`, `preferred` (int8: 1, then -1, or 0 for both if the texts are equal), and `groups` if the batch
    has none. Raises DataError unless `others` has one text for each row.
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
    """Return the worse text for each row: the template filled from its `row`. With an empty template, see `corrupted`.

    Raises DataError if a row lacks a key of the template.
    """
    if template:
        rows = cast("tuple[Row, ...]", batch.objects("row"))
        return [fill(template, row, "rejected") for row in rows]
    return [corrupted(str(answer), str(prompt)) for answer, prompt in _texts(batch)]


def labelled(batch: Batch, label: str) -> Batch:
    """Add each row's `answer` as its `completion`, and `desirable`, bool, from `row[label]`.

    With an empty label, about every second completion is `corrupted` and not desirable, which gives data for a trial.
    Raises DataError if a row lacks the label, or if it is neither true nor false.
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
                f"row {number} has {label} = {value!r}: a label is true if the completion is good and false if it is "
                "bad; name its key with `label`"
            )
    return batch.assign(completion=batch.objects("answer"), desirable=np.array(labels, np.bool_))


def mismatched(batch: Batch) -> Batch:
    """Pair each `prompt` with the next row's `completion`, the last with the first's. Keeps only these columns."""
    texts = batch.objects("completion")
    return batch.only("prompt").assign(completion=[*texts[1:], *texts[:1]])


def corrupted(answer: str, key: str) -> str:
    """Exchange two neighbouring characters of an answer that differ. `key` decides which ones.

    If no neighbours differ, the last character is removed.
    """
    places = [place for place in range(len(answer) - 1) if answer[place] != answer[place + 1]]
    if not places:
        return answer[:-1]
    at = places[_hash(key) % len(places)]
    return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]


def about_half(key: str) -> bool:
    """True for about every second text. It depends only on the text."""
    return _hash(key) % 2 == 0


def _texts(batch: Batch) -> list[tuple[object, object]]:
    return list(zip(batch.objects("answer"), batch.objects("prompt"), strict=True))


def _hash(text: str) -> int:
    """Return a number that depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
