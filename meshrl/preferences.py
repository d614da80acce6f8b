"""Preferences: pairs of completions of which one is better, and completions that are labelled good or bad."""

import hashlib
from collections.abc import Sequence
from typing import Final, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.role_config import Sampling
from meshrl.roles import Policy, Reference
from meshrl.tasks import Row, fill

_READ: Final = ("logprobs", "reference_logprobs", "loss_mask")


class PairSampling(Sampling):
    """How completions are drawn of which the best and the worst are compared: at least two for each prompt."""

    n: int = Field(default=2, ge=2)


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


def best_and_worst(batch: Batch) -> Batch:
    """Of each group the row of the highest and that of the lowest reward, side by side.

    Needs `rewards` and `groups`. Adds `preferred`, int8: 1 for the best and -1 for the worst, 0 for both in a group
    whose rewards are all equal. Of equal rewards the first is the best and the last the worst. DataError where a group
    has one row only.
    """
    order = np.lexsort((-np.arange(len(batch)), batch.rewards, batch.groups))  # by group, the worst first, then later
    _, starts, counts = np.unique(batch.groups[order], return_index=True, return_counts=True)
    if (counts < 2).any():
        group = int(batch.groups[order][starts[counts < 2][0]])
        raise DataError(f"group {group} has one row, and a pair takes two: draw sampling.n = 2 or more a prompt")
    worst, best = order[starts], order[starts + counts - 1]
    better = (batch.rewards[best] > batch.rewards[worst]).astype(np.int8)
    chosen = np.stack([best, worst], axis=1).reshape(-1)
    return batch.select(chosen).assign(preferred=np.stack([better, -better], axis=1).reshape(-1))


def log_ratios(batch: Batch) -> NDArray[np.float64]:
    """`log pi(y|x) / ref(y|x)` of each row: `logprobs` less `reference_logprobs` over its learned tokens, in nats.

    float64[rows]; 0 for a row without a learned token.
    """
    mask = batch.loss_mask
    apart = np.asarray(batch.ragged("logprobs").values, np.float64)
    apart = np.where(mask.values, apart - np.asarray(batch.ragged("reference_logprobs").values, np.float64), 0)
    sums = np.bincount(np.repeat(np.arange(len(mask)), mask.lengths), apart, minlength=len(mask))
    return sums.astype(np.float64, copy=False)


def pair_margins(log_ratios: ArrayLike, groups: ArrayLike, preferred: ArrayLike) -> NDArray[np.float64]:
    """The margin of each row's pair: the log-ratio of its preferred row less that of the other.

    `log_ratios` float[rows]; `groups` int[rows], two rows of each number; `preferred` [rows], 1 and -1 in a pair, or 0
    in both, whose margin is 0. Returns float64[rows], the same for both rows: h in DPO (arXiv:2305.18290), equation 7,
    before beta. DataError where the rows are no pairs.
    """
    values, labels, signs = np.asarray(log_ratios, np.float64), np.asarray(groups), np.asarray(preferred, np.int64)
    if not values.shape == labels.shape == signs.shape or values.ndim != 1:
        raise DataError(
            f"pair_margins: log-ratios have shape {values.shape}, groups {labels.shape}, preferred {signs.shape}: "
            "give one of each a row"
        )
    names, pair, counts = np.unique(labels, return_inverse=True, return_counts=True)
    whole = (counts == 2) & (np.bincount(pair, signs) == 0) & np.isin(np.bincount(pair, np.abs(signs)), (0, 2))
    if not whole.all():
        at = int(np.flatnonzero(~whole)[0])
        raise DataError(
            f"pair_margins: group {names[at]} has {counts[at]} rows, preferred {signs[pair == at].tolist()}: a pair is "
            "two rows of one group, one with 1 and one with -1, or both with 0; answer_pairs and best_and_worst make "
            "pairs"
        )
    margins = np.bincount(pair, signs * values, minlength=len(names))
    return margins.astype(np.float64, copy=False)[pair]


async def with_margins(policy: Policy, reference: Reference, batch: Batch) -> Batch:
    """Pairs with `logprobs`, `reference_logprobs`, `log_ratios` and `margins` (float32, one a row): before each update.

    The batch has tokens, `groups` and `preferred`. DataError where its rows are no pairs, or one has nothing to learn.
    """
    batch = await reference.logprobs(await policy.logprobs(batch))
    batch = await batch.load(*_READ, "groups", "preferred")
    learned = np.array([mask.any() for mask in batch.loss_mask], np.bool_)
    if not learned.all():
        raise DataError(
            f"row {int(np.flatnonzero(~learned)[0])} of the pairs has no learned token: `loss_mask` is False in all of "
            "it; leave its pair out"
        )
    ratios = log_ratios(batch)
    margins = pair_margins(ratios, batch.groups, batch.row("preferred"))
    return batch.assign(log_ratios=ratios.astype(np.float32), margins=margins.astype(np.float32))


def pair_metrics(batch: Batch) -> dict[str, float]:
    """What `with_margins` found: means over pairs in which one is preferred; NaN where there are none.

    `margin`; `accuracy`, how often it is above 0; `chosen_log_ratio` and `rejected_log_ratio`. All before the update.
    """
    return pair_means(batch, "log_ratios", "log_ratio")


def pair_means(batch: Batch, column: str, name: str) -> dict[str, float]:
    """Means over pairs in which one is preferred: of `margins`, how often they are above 0, and a column of both texts.

    That is `margin`, `accuracy`, `chosen_NAME` and `rejected_NAME`; NaN where there are no such pairs.
    """
    preferred, values, margins = (np.asarray(batch.row(each), np.float64) for each in ("preferred", column, "margins"))
    chosen, rejected = preferred > 0, preferred < 0
    found = {
        "margin": margins[chosen],
        "accuracy": margins[chosen] > 0,
        f"chosen_{name}": values[chosen],
        f"rejected_{name}": values[rejected],
    }
    return {key: float(each.mean()) if len(each) else float("nan") for key, each in found.items()}


async def mismatched_kl(policy: Policy, reference: Reference, batch: Batch) -> float:
    """An estimate of the policy's KL from the reference, in nats, as KTO takes it: never below 0.

    The mean log-ratio of the prompts' answers by the completions of others: each prompt with the next row's completion,
    over the whole batch. Needs `prompt` and `completion`. KTO (arXiv:2402.01306), the estimate of its reference point.
    """
    texts = (await batch.load("completion")).objects("completion")
    others = batch.only("prompt").assign(completion=[*texts[1:], *texts[:1]])
    others = await reference.logprobs(await policy.logprobs(await policy.encode(others)))
    return max(0.0, float(log_ratios(await others.load(*_READ)).mean()))


def _texts(batch: Batch) -> list[tuple[object, object]]:
    return list(zip(batch.objects("answer"), batch.objects("prompt"), strict=True))


def _hash(text: str) -> int:
    """A number that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
