"""Data for supervised algorithms, made from a task's rows: preference pairs, labelled texts, and labelled steps."""

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data import IMAGES, Batch, Ragged
from meshrl.errors import DataError, shortened
from meshrl.tasks.cells import accepted, fill, only_key
from meshrl.tasks.sources import Row
from meshrl.tasks.task import text_hash

_REMEDY: Final = "set `rejected` to a template over these keys"


def learned_answers(batch: Batch) -> list[str]:
    """Return the text that is learned of each row's `answer`: the first one, if several are accepted.

    Raises DataError for a row whose answer is null or blank, which would teach to say nothing, unless the batch has
    `messages`.
    """
    texts = [answer for answer, _ in _texts(batch)]
    for number, text in enumerate(texts if "messages" not in batch else ()):
        if not text:
            raise DataError(
                f"{batch.place(number)} has no answer to learn, which is null or blank: leave the row out, or set "
                "task.answer to a template over other keys"
            )
    return texts


def answer_pairs(batch: Batch, others: Sequence[object]) -> Batch:
    """Make a pair of each row: its `answer` as the preferred completion, and its text in `others`.

    Adds `completion`, `preferred` (int8: 1, then -1, or 0 for both if the texts are equal), and `groups` if the batch
    has none. Raises DataError unless `others` has one text for each row.
    """
    answers = learned_answers(batch)
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
        for number, row in enumerate(rows):
            if (key := only_key(template)) in row and row[key] is None:
                raise DataError(f"{batch.place(number)}: rejected: the row has null in {key!r}: leave the row out")
        return [fill(template, row, f"{batch.place(number)}: rejected", _REMEDY) for number, row in enumerate(rows)]
    return [corrupted(answer, prompt) for answer, prompt in _texts(batch)]


def labelled(batch: Batch, label: str) -> Batch:
    """Add each row's `answer` as its `completion`, and `desirable`, bool, from `row[label]`.

    With an empty label, about every second completion is `corrupted` and not desirable, which gives data for a trial.
    Raises DataError if a row lacks the label, or if it is neither true nor false.
    """
    if not label:
        desirable = [_is_of_half(f"label {prompt}") for _, prompt in _texts(batch)]
        pairs = zip(desirable, _texts(batch), strict=True)
        texts = [answer if good else corrupted(answer, prompt) for good, (answer, prompt) in pairs]
        return batch.assign(completion=texts, desirable=np.array(desirable, np.bool_))
    labels = [cast("Row", row).get(label) for row in batch.objects("row")]
    for number, value in enumerate(labels):
        if not isinstance(value, bool):
            raise DataError(
                f"{batch.place(number)} has {label} = {value!r}: a label is true if the completion is good and false "
                "if it is bad; name its key with `label`"
            )
    learned_answers(batch.select(np.array(labels, np.bool_)))
    return batch.assign(completion=[answer for answer, _ in _texts(batch)], desirable=np.array(labels, np.bool_))


def mismatched(batch: Batch) -> Batch:
    """Pair each `prompt` with the next row's `completion`, the last with the first's. Keeps only these and `images`.

    If the batch has `tokens`, they and `loss_mask` are paired and kept instead, where the completion begins at the
    first learned token. No row gets longer than the longest of the batch: its end is cut off.
    """
    images = {IMAGES: batch[IMAGES]} if IMAGES in batch else {}
    if "tokens" in batch:
        longest, firsts = max(batch.lengths, default=0), [int(np.argmax(mask)) for mask in batch.loss_mask]
        order = np.roll(np.arange(len(batch)), -1).tolist()

        def paired(column: Ragged) -> Ragged:
            pairs = zip(column, firsts, order, strict=True)
            rows = [np.concatenate([own[:at], column[other][firsts[other] :]])[:longest] for own, at, other in pairs]
            return Ragged.of(rows, column.values.dtype)

        return Batch.of(tokens=paired(batch.tokens), loss_mask=paired(batch.loss_mask), **images)
    texts = batch.objects("completion")
    return batch.only("prompt", *images).assign(completion=[*texts[1:], *texts[:1]])


def corrupted(answer: str, key: str) -> str:
    """Exchange two neighbouring characters of an answer that differ. `key` decides which ones.

    If no neighbours differ, the last character is removed.
    """
    places = [place for place in range(len(answer) - 1) if answer[place] != answer[place + 1]]
    if not places:
        return answer[:-1]
    at = places[text_hash(key) % len(places)]
    return answer[:at] + answer[at + 1] + answer[at] + answer[at + 2 :]


def least_margins(batch: Batch, key: str) -> NDArray[np.float32]:
    """Read the margin by which the better text of each pair should exceed the other: `row[key]`, float32[rows].

    0 with an empty key. Llama 2 (arXiv:2307.09288), section 3.2.2, uses larger margins for clearer preferences. Raises
    DataError if a row has no such number.
    """
    if not key:
        return np.zeros(len(batch), np.float32)
    margins = [cast("Row", row).get(key) for row in batch.objects("row")]
    for number, value in enumerate(margins):
        if not _is_number(value) or not 0 <= cast("float", value) < np.inf:
            raise DataError(
                f"{batch.place(number)} has {key} = {value!r}: the least margin of a pair is a number, at least 0. "
                "Name its key with `margin`"
            )
    return np.array(margins, np.float32)


def labelled_steps(batch: Batch, steps: str, labels: str) -> Batch:
    """Add `steps`, a tuple of texts, and `step_labels`, the probability that each is right, from each row's `row`.

    The arguments `steps` and `labels` name keys of `row`. With an empty `steps`, each character of the answer is a
    step. In about every second row the answer is `corrupted`, and its steps are right up to the first wrong character.
    This gives data for a trial. Raises DataError if a row lacks a key, its steps are not texts, or its labels do not
    fit them.
    """
    if not steps:
        made = [_characters(answer, prompt) for answer, prompt in _texts(batch)]
    else:
        rows = enumerate(cast("tuple[Row, ...]", batch.objects("row")))
        made = [_read_steps(batch.place(number), row, steps, labels) for number, row in rows]
    return batch.assign(steps=[texts for texts, _ in made], step_labels=[each for _, each in made])


def _characters(answer: str, prompt: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the characters of the answer, or of a corrupted one, and whether each prefix agrees with the answer."""
    texts = tuple((corrupted(answer, prompt) or answer) if _is_of_half(f"steps {prompt}") else answer)
    wrong = next((at for at, (one, other) in enumerate(zip(texts, answer, strict=False)) if one != other), len(texts))
    return texts, tuple(float(at < wrong) for at in range(len(texts)))


def _read_steps(where: str, row: Row, key: str, labels_key: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    texts, labels = row.get(key), row.get(labels_key)
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not texts:
        raise DataError(
            f"{where} has {key} = {shortened(texts)}: give a list of texts, one for each step. Name its key with "
            "`completion`"
        )
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where} has {key} = {shortened(texts)}: each step must be a text")
    remedy = "give as many labels as steps, each true, false or a number from 0 to 1"
    if not isinstance(labels, Sequence) or isinstance(labels, str) or len(labels) != len(texts):
        raise DataError(
            f"{where} has {len(texts)} steps and {labels_key} = {shortened(labels)}: {remedy}; say its key by `labels`"
        )
    for label in labels:
        if not (isinstance(label, bool) or (_is_number(label) and 0 <= label <= 1)):
            raise DataError(f"{where} has the label {label!r} in {labels_key}: {remedy}")
    return tuple(map(str, texts)), tuple(map(float, labels))


def _texts(batch: Batch) -> list[tuple[str, str]]:
    answers = [next(iter(accepted(answer)), "") for answer in batch.objects("answer")]
    return list(zip(answers, map(str, batch.objects("prompt")), strict=True))


def _is_of_half(key: str) -> bool:
    """True for about every second text. It depends only on the text."""
    return text_hash(key) % 2 == 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
