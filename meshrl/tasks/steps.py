"""Texts with labelled steps, and least margins of pairs, read from a task's rows."""

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch
from meshrl.errors import DataError, shortened
from meshrl.tasks.pairs import about_half, corrupted
from meshrl.tasks.sources import Row

_STEPS: Final = "give as many labels as steps, each true, false or a number from 0 to 1"


def least_margins(batch: Batch, key: str) -> NDArray[np.float32]:
    """Read the margin by which the better text of each pair should exceed the other: `row[key]`, float32[rows].

    0 with an empty key. Llama 2 (arXiv:2307.09288), section 3.2.2, uses larger margins for clearer preferences. Raises
    DataError if a row has no such number.
    """
    if not key:
        return np.zeros(len(batch), np.float32)
    found = [cast("Row", row).get(key) for row in batch.objects("row")]
    for number, value in enumerate(found):
        if not _is_number(value) or not 0 <= cast("float", value) < np.inf:
            raise DataError(
                f"row {number} has {key} = {value!r}: the least margin of a pair is a number, at least 0. Name its "
                "key with `margin`"
            )
    return np.array(found, np.float32)


def labelled_steps(batch: Batch, steps: str, labels: str) -> Batch:
    """Add `steps`, a tuple of texts, and `step_labels`, the probability that each is right, from each row's `row`.

    The arguments `steps` and `labels` name keys of `row`. With an empty `steps`, each character of the answer is a
    step. In about every second row the answer is `corrupted`, and its steps are right up to the first wrong character.
    This gives data for a trial. Raises DataError if a row lacks a key, its steps are not texts, or its labels do not
    fit them.
    """
    if not steps:
        pairs = [_made(str(a), str(p)) for a, p in zip(batch.objects("answer"), batch.objects("prompt"), strict=True)]
        return batch.assign(steps=[each for each, _ in pairs], step_labels=[each for _, each in pairs])
    rows = [cast("Row", row) for row in batch.objects("row")]
    texts = [_steps(number, row, steps) for number, row in enumerate(rows)]
    told = [_labels(number, row, labels, len(own)) for (number, row), own in zip(enumerate(rows), texts, strict=True)]
    return batch.assign(steps=texts, step_labels=told)


def _made(answer: str, prompt: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the characters of the answer, or of a corrupted one, and whether each prefix agrees with the answer."""
    texts = tuple((corrupted(answer, prompt) or answer) if about_half(f"steps {prompt}") else answer)
    wrong = next((at for at, (one, other) in enumerate(zip(texts, answer, strict=False)) if one != other), len(texts))
    return texts, tuple(float(at < wrong) for at in range(len(texts)))


def _steps(number: int, row: Row, key: str) -> tuple[str, ...]:
    texts = row.get(key)
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not texts:
        raise DataError(
            f"row {number} has {key} = {shortened(texts)}: give a list of texts, one for each step. Name its key with "
            "`completion`"
        )
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"row {number} has {key} = {shortened(texts)}: each step must be a text")
    return tuple(str(text) for text in texts)


def _labels(number: int, row: Row, key: str, steps: int) -> tuple[float, ...]:
    labels = row.get(key)
    if not isinstance(labels, Sequence) or isinstance(labels, str) or len(labels) != steps:
        raise DataError(
            f"row {number} has {steps} steps and {key} = {shortened(labels)}: {_STEPS}; say its key by `labels`"
        )
    for label in labels:
        if not (isinstance(label, bool) or (_is_number(label) and 0 <= label <= 1)):
            raise DataError(f"row {number} has the label {label!r} in {key}: {_STEPS}")
    return tuple(float(label) for label in labels)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
