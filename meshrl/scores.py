"""What a reward model's losses read of pairs of texts and of texts in steps, and how well its scores tell them."""

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch, Ragged
from meshrl.errors import DataError
from meshrl.preferences import about_half, corrupted, pair_margins, pair_means
from meshrl.roles import RewardModel
from meshrl.tasks import Row

_STEPS: Final = "give as many labels as steps, each true, false or a number from 0 to 1"


async def with_scores(model: RewardModel, batch: Batch) -> Batch:
    """Pairs with what `BradleyTerryLoss` reads: before each update.

    The batch has what `encode` adds, `groups` and `preferred`. Adds `token_scores`, and one a row, float32: `scores`,
    the text's own; `margins`, the preferred text's score less the other's; `pair_sums`, both together; and
    `least_margins`, 0, unless the batch has them. DataError where its rows are no pairs, or one has not one score.
    """
    batch = await model.token_scores(batch)
    batch = await batch.load("token_scores", "loss_mask", "groups", "preferred")
    counts = np.array([int(np.count_nonzero(mask)) for mask in batch.loss_mask], np.int64)
    if (counts != 1).any():
        row = int(np.flatnonzero(counts != 1)[0])
        raise DataError(
            f"row {row} of the pairs is scored at {counts[row]} tokens, and a text of a pair has one score: encode "
            "pairs from `prompt` and `completion`, without `steps`"
        )
    scores = np.asarray(batch.ragged("token_scores").values, np.float64)[np.asarray(batch.loss_mask.values, np.bool_)]
    margins = pair_margins(scores, batch.groups, batch.row("preferred"))
    _, pair = np.unique(batch.groups, return_inverse=True)
    sums = np.bincount(pair, scores)[pair] if len(batch) else scores
    if "least_margins" not in batch:
        batch = batch.assign(least_margins=np.zeros(len(batch), np.float32))
    return batch.assign(
        scores=scores.astype(np.float32), margins=margins.astype(np.float32), pair_sums=sums.astype(np.float32)
    )


def least_margins(batch: Batch, key: str) -> NDArray[np.float32]:
    """By how much the better text of each row's pair should be above the other: the number `row[key]`, float32[rows].

    0 with no key. Llama 2 (arXiv:2307.09288), section 3.2.2, gives more to pairs that were told apart with more
    certainty. DataError where a row has no such number.
    """
    if not key:
        return np.zeros(len(batch), np.float32)
    found = [cast("Row", row).get(key) for row in batch.objects("row")]
    for number, value in enumerate(found):
        if not _is_number(value) or not 0 <= cast("float", value) < np.inf:
            raise DataError(
                f"row {number} has {key} = {value!r}: a pair's least margin is a number from 0; name its key with "
                "`margin`"
            )
    return np.array(found, np.float32)


def score_metrics(batch: Batch) -> dict[str, float]:
    """What `with_scores` found: means over pairs in which one is preferred; NaN where there are none.

    `margin`; `accuracy`, how often it is above 0; `chosen_score` and `rejected_score`. All before the update.
    """
    return pair_means(batch, "scores", "score")


def labelled_steps(batch: Batch, steps: str, labels: str) -> Batch:
    """Each row with its `steps`, a tuple of texts, and `step_labels`, of the chance that each is right: from its `row`.

    `steps` and `labels` name keys of `row`. With no `steps`, each character of the answer is one, in about every second
    row of the answer `corrupted`, and those are right up to the first that is not the answer's: data to try things on.
    DataError where a row lacks a key, its steps are not texts, or its labels do not fit them.
    """
    if not steps:
        pairs = [_made(str(a), str(p)) for a, p in zip(batch.objects("answer"), batch.objects("prompt"), strict=True)]
        return batch.assign(steps=[each for each, _ in pairs], step_labels=[each for _, each in pairs])
    rows = [cast("Row", row) for row in batch.objects("row")]
    texts = [_steps(number, row, steps) for number, row in enumerate(rows)]
    told = [_labels(number, row, labels, len(own)) for (number, row), own in zip(enumerate(rows), texts, strict=True)]
    return batch.assign(steps=texts, step_labels=told)


async def with_labels(batch: Batch) -> Batch:
    """The batch with `labels`, float32 by token: each row's `step_labels` at the tokens where `loss_mask` is True.

    0 at the others. DataError where a row has not as many labels as such tokens.
    """
    batch = await batch.load("loss_mask", "step_labels")
    mask = np.asarray(batch.loss_mask.values, np.bool_)
    told = [cast("Sequence[float]", each) for each in batch.objects("step_labels")] if len(batch) else []
    for row, (places, own) in enumerate(zip(batch.loss_mask, told, strict=True)):
        if np.count_nonzero(places) != len(own):
            raise DataError(
                f"row {row} is scored at {np.count_nonzero(places)} tokens and has {len(own)} labels: encode it from "
                "`steps`, with a label for each"
            )
    labels = np.zeros(len(mask), np.float32)
    labels[mask] = [float(label) for row in told for label in row]
    return batch.assign(labels=Ragged(labels, batch.loss_mask.offsets))


async def step_metrics(model: RewardModel, batch: Batch) -> dict[str, float]:
    """How well the model tells right steps from wrong ones: a batch that `with_labels` has made; NaN without such.

    `accuracy`, how often its score is above 0 where the label is above 1/2, and below 0 elsewhere: one of 0, as a new
    head gives, is on neither side; `right_score` and `wrong_score`, the mean scores of both kinds; `solved`, how often
    all steps of a text are told so.
    """
    batch = await (await model.token_scores(batch)).load("token_scores", "loss_mask", "labels")
    mask = np.asarray(batch.loss_mask.values, np.bool_)
    scores = np.asarray(batch.ragged("token_scores").values, np.float64)[mask]
    right = np.asarray(batch.ragged("labels").values, np.float64)[mask] > 0.5
    told = np.where(right, scores > 0, scores < 0)
    row = np.repeat(np.arange(len(batch)), batch.loss_mask.lengths)[mask]
    missed = np.bincount(row[~told], minlength=len(batch))
    found = {
        "accuracy": told,
        "right_score": scores[right],
        "wrong_score": scores[~right],
        "solved": missed[np.unique(row)] == 0,
    }
    return {name: float(values.mean()) if len(values) else float("nan") for name, values in found.items()}


def _made(answer: str, prompt: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """The characters of the answer, or of a corrupted one, and whether all up to each are the answer's."""
    texts = tuple((corrupted(answer, prompt) or answer) if about_half(f"steps {prompt}") else answer)
    wrong = next((at for at, (one, other) in enumerate(zip(texts, answer, strict=False)) if one != other), len(texts))
    return texts, tuple(float(at < wrong) for at in range(len(texts)))


def _steps(number: int, row: Row, key: str) -> tuple[str, ...]:
    texts = row.get(key)
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not texts:
        raise DataError(
            f"row {number} has {key} = {_short(texts)}: give a list of texts, one a step; say its key by `completion`"
        )
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"row {number} has {key} = {_short(texts)}: each step is a text")
    return tuple(str(text) for text in texts)


def _labels(number: int, row: Row, key: str, steps: int) -> tuple[float, ...]:
    labels = row.get(key)
    if not isinstance(labels, Sequence) or isinstance(labels, str) or len(labels) != steps:
        raise DataError(
            f"row {number} has {steps} steps and {key} = {_short(labels)}: {_STEPS}; say its key by `labels`"
        )
    for label in labels:
        if not (isinstance(label, bool) or (_is_number(label) and 0 <= label <= 1)):
            raise DataError(f"row {number} has the label {label!r} in {key}: {_STEPS}")
    return tuple(float(label) for label in labels)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
