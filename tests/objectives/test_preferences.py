"""Pairs and labels: what they are made of, and how far a policy prefers what it should."""

import math
import re
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshrl import PolicyConfig, ReferenceConfig, mismatched, preference_columns, reference_point
from meshrl.config import validate
from meshrl.data import Batch, Ragged
from meshrl.errors import ConfigError, DataError
from meshrl.losses import PreferenceLoss, token_weights
from meshrl.objectives import best_and_worst, log_ratios, pair_margins, pair_metrics
from meshrl.roles import PairSampling
from meshrl.tasks import answer_pairs, corrupted, labelled, rejected_answers
from meshrl.testing import FakePolicy, FakeReference

SUMS = Batch.of(
    prompt=["1+1=", "2+2=", "3+3="],
    answer=["2", "4", "6"],
    row=[{"worse": "3", "good": True}, {"worse": "4", "good": False}, {"worse": "7", "good": True}],
)


def test_an_answer_and_what_is_worse_are_a_pair() -> None:
    pairs = answer_pairs(SUMS, rejected_answers(SUMS, "{worse}"))
    assert pairs.objects("completion") == ("2", "3", "4", "4", "6", "7")
    assert pairs.row("preferred").tolist() == [1, -1, 0, 0, 1, -1]  # a text is not better than itself
    assert pairs.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert answer_pairs(SUMS.assign(groups=np.array([9, 5, 7])), ["", "", ""]).groups.tolist() == [9, 9, 5, 5, 7, 7]


def test_a_corrupted_answer_is_another_and_always_the_same() -> None:
    texts = [corrupted(text, "prompt") for text in ("abcdef", "aaab", "aaa", "a", "")]
    assert texts[1:] == ["aaba", "aa", "", ""]
    assert texts[0] != "abcdef"
    assert sorted(texts[0]) == sorted("abcdef")
    assert corrupted("abcdef", "prompt") == texts[0]
    assert len({corrupted("abcdef", str(key)) for key in range(50)}) == 5
    assert rejected_answers(SUMS, "") == ["", "", ""]


def test_labels_come_from_the_row_or_every_second_answer_is_corrupted() -> None:
    found = labelled(SUMS, "good")
    assert found.row("desirable").tolist() == [True, False, True]
    assert found.objects("completion") == ("2", "4", "6")
    words = Batch.of(prompt=[f"{n}>" for n in range(200)], answer=["abc"] * 200)
    made = labelled(words, "")
    desirable = made.row("desirable")
    assert 70 < desirable.sum() < 130
    assert [text == "abc" for text in made.objects("completion")] == desirable.tolist()


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1))
def test_the_best_and_the_worst_of_each_group(rows: list[tuple[int, float]]) -> None:
    rows += [(group, reward) for group, reward in dict(rows).items()]  # two of each at least
    groups, rewards = np.array([group for group, _ in rows]), np.array([reward for _, reward in rows], np.float32)
    found = best_and_worst(Batch.of(groups=groups, rewards=rewards, number=np.arange(len(rows))))
    assert found.groups.tolist() == np.repeat(np.unique(groups), 2).tolist()
    assert len(set(found.row("number").tolist())) == len(found)
    for at in range(0, len(found), 2):
        own = rewards[groups == found.groups[at]]
        assert found.rewards[at : at + 2].tolist() == [own.max(), own.min()]
        assert found.row("preferred")[at : at + 2].tolist() == ([1, -1] if own.max() > own.min() else [0, 0])


MASK = Ragged.of([[0, 1, 1], [0, 0], [0, 1]], np.bool_)


def test_log_ratios_are_sums_over_learned_tokens() -> None:
    batch = Batch.of(
        loss_mask=MASK,
        logprobs=Ragged.make(np.array([9, 1, 2, 9, 9, 9, 5], np.float32), MASK.offsets),
        reference_logprobs=Ragged.make(np.array([0, 2, 4, 0, 0, 0, 1], np.float32), MASK.offsets),
    )
    assert log_ratios(batch).tolist() == [-3.0, 0.0, 4.0]


def test_margins_by_hand() -> None:
    found = pair_margins([1.0, 5.0, -2.0, 3.0, 8.0, 9.0], [4, 2, 4, 2, 0, 0], [1, -1, -1, 1, 0, 0])
    assert found.tolist() == [3.0, -2.0, 3.0, -2.0, 0.0, 0.0]
    assert pair_margins([], [], []).tolist() == []


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: answer_pairs(SUMS, ["3"]), "3 rows and 1 other texts: give one for each row"),
        (lambda: labelled(SUMS, "god"), "row 0 has god = None: a label is true if the completion is good"),
        (lambda: rejected_answers(SUMS, "{wors}"), "needs 'wors', which the row lacks; did you mean 'worse'?"),
        (
            lambda: best_and_worst(Batch.of(groups=np.array([3, 1, 3]), rewards=np.zeros(3, np.float32))),
            "group 1 has one row, and a pair takes two: draw sampling.n = 2 or more",
        ),
        (lambda: pair_margins([1.0], [1, 1], [1, -1]), "log-ratios have shape (1,), groups (2,), preferred (2,)"),
        (lambda: pair_margins([1.0, 2.0], [1, 1], [1, 1]), "group 1 has 2 rows, preferred [1, 1]: a pair is"),
        (lambda: pair_margins([1.0, 2.0, 3.0], [1, 1, 6], [1, -1, 0]), "group 6 has 1 rows, preferred [0]"),
        (lambda: pair_margins([1.0] * 4, [1] * 4, [1, -1, 1, -1]), "group 1 has 4 rows"),
    ],
)
def test_what_is_no_preference_is_refused_in_words(mistake: Callable[[], object], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        mistake()


def test_pairs_need_two_completions_a_prompt() -> None:
    with pytest.raises(ConfigError, match="n = 1: must be greater than or equal to 2"):
        validate(PairSampling, {"n": 1}, "file.toml")


async def test_margins_and_what_is_told_of_them() -> None:
    policy, reference = FakePolicy(PolicyConfig(model="none")), FakeReference(ReferenceConfig(model="none"))
    pairs = await preference_columns(
        await reference.logprobs(await policy.logprobs(await policy.encode(answer_pairs(SUMS, ["3", "4", "7"]))))
    )
    assert pairs.row("margins").tolist() == [0.0] * 6
    pairs = pairs.assign(margins=np.array([2, 2, 0, 0, -1, -1]), log_ratios=np.array([3, 1, 9, 9, 1, 2]))
    expected = {"margin": 0.5, "accuracy": 0.5, "chosen_log_ratio": 2.0, "rejected_log_ratio": 1.5}
    assert pair_metrics(pairs) == expected
    assert np.isnan(list(pair_metrics(pairs.select([2, 3])).values())).all()
    assert (
        await reference_point(
            await reference.logprobs(await policy.logprobs(await policy.encode(mismatched(labelled(SUMS, "good")))))
        )
        == 0.0
    )
    masked = pairs.assign(loss_mask=Ragged(np.zeros(len(pairs.tokens.values), np.bool_), pairs.tokens.offsets))
    with pytest.raises(DataError, match="row 0 of the pairs has no learned token"):
        await preference_columns(await reference.logprobs(await policy.logprobs(masked)))


class Telling(FakePolicy):
    """A policy whose log-probability of each completion to each prompt is what it is told."""

    def __init__(self, told: Mapping[tuple[str, str], float]) -> None:
        super().__init__(PolicyConfig(model="none"))
        self._told = told

    async def logprobs(self, batch: Batch) -> Batch:
        pairs = zip(batch.objects("prompt"), batch.objects("completion"), strict=True)
        rows = [
            np.where(mask, self._told[str(prompt), str(completion)] / max(1, int(np.count_nonzero(mask))), 9.0)
            for (prompt, completion), mask in zip(pairs, batch.loss_mask, strict=True)
        ]
        return batch.assign(logprobs=Ragged.of(rows, np.float32))


class Silent(FakeReference):
    """A reference whose log-probabilities are 0."""

    async def logprobs(self, batch: Batch) -> Batch:
        zeros = np.zeros(len(batch.tokens.values), np.float32)
        return batch.assign(reference_logprobs=Ragged(zeros, batch.tokens.offsets))


async def test_the_reference_point_is_of_each_prompt_with_the_next_rows_completion() -> None:
    rows = Batch.of(prompt=["p", "q", "r"], completion=["one", "two", "three"])
    told = {(prompt, text): -9.0 for prompt in ("p", "q", "r") for text in ("one", "two", "three")}
    told |= {("p", "two"): 2.5, ("q", "three"): -1.0, ("r", "one"): 0.75}
    reference = Silent(ReferenceConfig(model="none"))
    assert await reference_point(
        await reference.logprobs(await Telling(told).logprobs(await Telling(told).encode(mismatched(rows))))
    ) == pytest.approx((2.5 - 1.0 + 0.75) / 3)
    told["q", "three"] = -7.0
    assert (
        await reference_point(
            await reference.logprobs(await Telling(told).logprobs(await Telling(told).encode(mismatched(rows))))
        )
        == 0.0
    )


class Known(FakePolicy):
    """A policy of known log-probs."""

    def __init__(self, column: Ragged) -> None:
        super().__init__(PolicyConfig(model="none"))
        self._column = column

    async def logprobs(self, batch: Batch) -> Batch:
        return batch.assign(logprobs=self._column)


class KnownReference(FakeReference):
    """A reference of known log-probs."""

    def __init__(self, column: Ragged) -> None:
        super().__init__(ReferenceConfig(model="none"))
        self._column = column

    async def logprobs(self, batch: Batch) -> Batch:
        return batch.assign(reference_logprobs=self._column)


async def test_margins_and_the_loss_of_them_are_dpos_of_the_learned_tokens() -> None:
    """`-log sigmoid(beta (log pi(w)/ref(w) - log pi(l)/ref(l)))`, the mean over pairs: arXiv:2305.18290, equation 7."""
    random = np.random.default_rng(8)
    mask = Ragged.of([[False, *random.integers(0, 2, length), True] for length in (2, 5, 1, 3, 4, 2)], np.bool_)
    columns = [Ragged(random.normal(-2, 1, len(mask.values)).astype(np.float32), mask.offsets) for _ in range(2)]
    batch = Batch.of(
        groups=np.array([4, 1, 1, 4, 6, 6]), preferred=np.array([-1, 1, -1, 1, 1, -1], np.int8), loss_mask=mask
    )
    pairs = await preference_columns(await KnownReference(columns[1]).logprobs(await Known(columns[0]).logprobs(batch)))
    ratios = [
        sum(float(p) - float(q) for p, q, learned in zip(*row, strict=True) if learned)
        for row in zip(*columns, mask, strict=True)
    ]
    margins = [ratios[chosen] - ratios[rejected] for chosen, rejected in ((3, 0), (1, 2), (4, 5))]
    assert pairs.row("log_ratios").tolist() == pytest.approx(ratios, rel=1e-6)
    assert pairs.row("margins").tolist() == pytest.approx([margins[pair] for pair in (0, 1, 1, 0, 2, 2)], rel=1e-6)

    learned = np.asarray(mask.values, np.bool_)
    row = np.repeat(np.arange(6), mask.lengths)[learned]
    logprobs = torch.from_numpy(columns[0].values[learned].astype(np.float64))
    loss = PreferenceLoss(beta=0.3)
    told = {
        "logprobs": logprobs,
        "margins": torch.from_numpy(pairs.row("margins").astype(np.float64)[row]),
        "preferred": torch.from_numpy(batch.row("preferred")[row]),
        "rows": torch.from_numpy(row),
    }
    weights = token_weights(mask, loss.normalise, tokens=len(row), rows=6)[learned].astype(np.float64)
    expected = np.mean([math.log(1 + math.exp(-0.3 * margin)) for margin in margins])
    assert loss(logprobs, told).values.numpy() @ weights == pytest.approx(expected, rel=1e-6)


async def test_a_margin_is_of_the_preferred_row_less_the_other() -> None:
    pairs = answer_pairs(SUMS, ["3", "5", "7"])
    told = {("1+1=", "2"): -1.0, ("1+1=", "3"): -4.0, ("2+2=", "4"): -2.0, ("2+2=", "5"): -0.5}
    told |= {("3+3=", "6"): -3.0, ("3+3=", "7"): -3.25}
    policy = Telling(told)
    pairs = await preference_columns(
        await Silent(ReferenceConfig(model="none")).logprobs(await policy.logprobs(await policy.encode(pairs)))
    )
    assert pairs.row("margins").tolist() == pytest.approx([3.0, 3.0, -1.5, -1.5, 0.25, 0.25])
    assert pairs.row("log_ratios").tolist() == pytest.approx(list(told.values()))
