"""Pairs and labels: what they are made of, and how far a policy prefers what it should."""

import re
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from meshrl import labelled_steps, least_margins, mismatched, reference_point, score_columns, with_labels
from meshrl.algo import best_and_worst, pair_metrics, preference_columns, score_metrics, step_score_metrics
from meshrl.algo.kl import log_ratios
from meshrl.algo.preference import pair_margins
from meshrl.config import validate
from meshrl.data import Batch, Ragged
from meshrl.errors import ConfigError, DataError
from meshrl.roles import PairSampling
from meshrl.tasks import answer_pairs, labelled, rejected_answers
from meshrl.tasks.supervised import corrupted

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
    assert answer_pairs(SUMS.assign(groups=np.array([9, 5, 7])), [""] * 3).groups.tolist() == [9, 9, 5, 5, 7, 7]


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


def one_row(**row: object) -> Batch:
    return Batch.of(prompt=["ab>"], answer=["ba"], row=[row])


def test_rows_give_margins_steps_and_labels() -> None:
    assert least_margins(one_row(by=0.5), "by").tolist() == [0.5]
    assert least_margins(one_row(), "").tolist() == [0]
    told = labelled_steps(one_row(parts=["b", "a"], right=[True, 0.25]), "parts", "right")
    assert told.objects("steps") == (("b", "a"),)
    assert told.objects("step_labels") == ((1.0, 0.25),)
    for wrong in ("much", -1, None, True, float("nan")):
        with pytest.raises(DataError, match="the least margin of a pair is a number, at least 0"):
            least_margins(one_row(by=wrong), "by")
    for parts, right, message in (
        ("ba", [1], "give a list of texts"),
        ([], [], "give a list of texts"),
        ([1], [1], "each step must be a text"),
        (["b"], [1, 0], "1 steps and right"),
        (["b"], [2], "has the label 2"),
        (["b"], ["good"], "has the label 'good'"),
    ):
        with pytest.raises(DataError, match=message):
            labelled_steps(one_row(parts=parts, right=right), "parts", "right")


def test_steps_are_made_of_answers() -> None:
    prompts = [f"{number}>" for number in range(50)]
    made, alone = (labelled_steps(Batch.of(prompt=prompts, answer=[a] * 50), "", "labels") for a in ("abcd", "a"))
    assert set(alone.objects("steps")) == {("a",)}
    texts = ["".join(cast("tuple[str, ...]", steps)) for steps in made.objects("steps")]
    assert 10 < texts.count("abcd") < 40
    for text, labels in zip(texts, made.objects("step_labels"), strict=True):
        wrong = next((at for at, pair in enumerate(zip(text, "abcd", strict=True)) if pair[0] != pair[1]), 4)
        assert labels == tuple([1.0] * wrong + [0.0] * (4 - wrong))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1))
def test_the_best_and_the_worst_of_each_group(rows: list[tuple[int, float]]) -> None:
    rows += [(group, reward) for group, reward in dict(rows).items()]  # two of each at least
    groups, rewards = np.array([group for group, _ in rows]), np.array([reward for _, reward in rows], np.float32)
    found = best_and_worst(Batch.of(groups=groups, rewards=rewards, number=np.arange(len(rows))))
    assert found.groups.tolist() == np.repeat(np.unique(groups), 2).tolist()
    for at in range(0, len(found), 2):
        own = np.flatnonzero(groups == found.groups[at])
        best, worst = rewards[own].max(), rewards[own].min()
        assert found.rewards[at : at + 2].tolist() == [best, worst]
        # Of equal rewards the first is the best, and the last the worst.
        expected = [own[rewards[own] == best][0], own[rewards[own] == worst][-1]]
        assert found.row("number")[at : at + 2].tolist() == expected
        assert found.row("preferred")[at : at + 2].tolist() == ([1, -1] if best > worst else [0, 0])


MASK = Ragged.of([[0, 1, 1], [0, 0], [0, 1]], np.bool_)


def scored(mask: Ragged, policy: ArrayLike, reference: ArrayLike, **columns: ArrayLike) -> Batch:
    own, other = (Ragged.make(np.asarray(values, np.float32), mask.offsets) for values in (policy, reference))
    given = {name: np.asarray(values) for name, values in columns.items()}
    return Batch.of(loss_mask=mask, logprobs=own, reference_logprobs=other, **given)


def test_log_ratios_are_sums_over_learned_tokens_and_margins_their_differences() -> None:
    assert log_ratios(scored(MASK, [9, 1, 2, 9, 9, 9, 5], [0, 2, 4, 0, 0, 0, 1])).tolist() == [-3.0, 0.0, 4.0]
    found = pair_margins([1.0, 5.0, -2.0, 3.0, 8.0, 9.0], [4, 2, 4, 2, 0, 0], [1, -1, -1, 1, 0, 0])
    assert found.tolist() == [3.0, -2.0, 3.0, -2.0, 0.0, 0.0]
    assert pair_margins([], [], []).tolist() == []


async def test_the_columns_of_pairs_are_dpos_of_the_learned_tokens() -> None:
    """`log pi(w)/ref(w) - log pi(l)/ref(l)`: arXiv:2305.18290, equation 7."""
    mask = Ragged.of([[0, 1, 1], [1, 0], [0, 1]] * 2, np.bool_)
    own = np.array([9, 1, 2, 0.5, 9, 9, 5, 9, 0, 1, 2, 9, 9, 3], np.float32)
    columns = {"groups": [4, 1, 1, 4, 6, 6], "preferred": [-1, 1, -1, 1, 1, -1]}
    pairs = await preference_columns(scored(mask, own, own % 2, **columns))
    assert pairs.row("log_ratios").tolist() == [2, 0, 4, 0, 2, 2]
    assert pairs.row("margins").tolist() == [-2, -4, -4, -2, 0, 0]
    nothing = scored(Ragged(np.arange(14) > 3, mask.offsets), own, own, **columns)
    with pytest.raises(DataError, match="row 0 of the pairs has no learned token"):
        await preference_columns(nothing)


def test_what_is_told_of_pairs_is_the_mean_over_those_that_prefer_one() -> None:
    pairs = answer_pairs(SUMS, ["3", "4", "7"]).assign(
        margins=np.array([2, 2, 0, 0, -1, -1]), log_ratios=np.array([3, 1, 9, 9, 1, 2])
    )
    expected = {"margin": 0.5, "accuracy": 0.5, "chosen_log_ratio": 2.0, "rejected_log_ratio": 1.5}
    assert pair_metrics(pairs) == expected
    assert np.isnan(list(pair_metrics(pairs.select([2, 3])).values())).all()


async def test_the_reference_point_is_of_each_prompt_with_the_next_rows_completion_and_never_negative() -> None:
    rows = mismatched(Batch.of(prompt=["p", "q", "r"], completion=["one", "two", "three"]))
    told = dict(zip(rows.objects("prompt"), rows.objects("completion"), strict=True))
    assert told == {"p": "two", "q": "three", "r": "one"}
    learned = Ragged.of([[0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1]], np.bool_)
    rows = mismatched(Batch.of(tokens=Ragged.of([[1, 2], [3, 4, 5, 6, 7], [8, 9, 8, 9]], np.int32), loss_mask=learned))
    assert [row.tolist() for row in rows.tokens] == [[1, 5, 6, 7], [3, 4, 9], [8, 9, 8, 2]]
    assert [row.tolist() for row in rows.loss_mask] == [[0, 1, 1, 1], [0, 0, 1], [0, 0, 0, 1]]
    learned = Ragged.of([[0, 0, 0, 0, 1], [0, 1, 1, 1]], np.bool_)
    cut = mismatched(Batch.of(tokens=Ragged.of([[1, 1, 1, 1, 2], [3, 5, 6, 7]], np.int32), loss_mask=learned))
    assert [row.tolist() for row in cut.tokens] == [[1, 1, 1, 1, 5], [3, 2]]
    own = [9, 1, 2, 9, 9, 9, 5]
    assert await reference_point(scored(MASK, own, [0, 2, 1, 0, 0, 0, 1])) == pytest.approx((0.0 + 0.0 + 4.0) / 3)
    assert await reference_point(scored(MASK, own, [0, 9, 1, 0, 0, 0, 1])) == 0.0


async def test_the_columns_of_scored_pairs_are_of_both_texts() -> None:
    groups, preferred = np.array([7, 3, 3, 7, 5, 5]), np.array([1, -1, 1, -1, 0, 0])
    scores, other = np.array([0.3, -1.2, 2.0, 1.1, 0.5, -0.5]), [3, 2, 1, 0, 5, 4]
    # Where nothing is scored, the column is not read.
    columns = {"token_scores": Ragged.of([[9, 9, score] for score in scores], np.float32)}
    columns["loss_mask"] = Ragged.of([[False, False, True]] * 6, np.bool_)
    batch = Batch.of(groups=groups, preferred=preferred, **columns)
    told = await score_columns(batch)
    assert told.row("scores").tolist() == pytest.approx(scores.tolist())
    assert told.row("pair_sums").tolist() == pytest.approx((scores + scores[other]).tolist())
    assert told.row("margins").tolist() == pytest.approx((preferred * (scores - scores[other])).tolist())
    assert told.row("least_margins").tolist() == [0.0] * 6
    given = await score_columns(batch.assign(least_margins=np.arange(6.0)))
    assert given.row("least_margins").tolist() == [0, 1, 2, 3, 4, 5]
    expected = {"margin": (-0.8 + 3.2) / 2, "accuracy": 0.5, "chosen_score": 1.15, "rejected_score": -0.05}
    assert score_metrics(told) == pytest.approx(expected)


async def test_labels_stand_where_steps_are_scored_and_what_is_told_of_them() -> None:
    mask = Ragged.of([[0, 1, 0, 1], [1, 1], [0]], np.bool_)
    scores = Ragged.make(np.array([9, 2, 9, -1, 3, 0, 9], np.float32), mask.offsets)
    batch = Batch.of(loss_mask=mask, token_scores=scores, step_labels=[(1.0, 0.0), (0.75, 0.25), ()])
    told = await with_labels(batch)
    assert [row.tolist() for row in told.ragged("labels")] == [[0, 1, 0, 0], [0.75, 0.25], [0]]
    expected = {"accuracy": 0.75, "right_score": 2.5, "wrong_score": -0.5, "solved": 0.5}
    assert await step_score_metrics(told) == expected
    with pytest.raises(DataError, match="row 1 is scored at 2 tokens and has 1 labels"):
        await with_labels(batch.assign(step_labels=[(1.0, 0.0), (1.0,), ()]))


async def test_what_is_no_pair_of_texts_is_refused() -> None:
    for preferred, mask, message in (
        ([1, 1], [0, 1], "a pair is two rows of one group"),
        ([1, -1], [1, 1], "row 0 of the pairs is scored at 2 tokens, and a text of a pair has one score"),
    ):
        columns = {"loss_mask": Ragged.of([mask] * 2, np.bool_), "token_scores": Ragged.of([[0, 0]] * 2, np.float32)}
        with pytest.raises(DataError, match=message):
            await score_columns(Batch.of(groups=np.zeros(2, int), preferred=np.array(preferred, np.int8), **columns))


LONELY = Batch.of(groups=np.array([3, 1, 3]), rewards=np.zeros(3, np.float32))
MISTAKES: list[tuple[Callable[[], object], str]] = [
    (lambda: answer_pairs(SUMS, ["3"]), "3 rows and 1 other texts: give one for each row"),
    (lambda: labelled(SUMS, "god"), "row 0 has god = None: a label is true if the completion is good"),
    (lambda: rejected_answers(SUMS, "{wors}"), "needs 'wors', which the row lacks; did you mean 'worse'?"),
    (lambda: best_and_worst(LONELY), "group 1 has one row, and a pair takes two: draw sampling.n = 2 or more"),
    (lambda: pair_margins([1.0], [1, 1], [1, -1]), "log-ratios have shape (1,), groups (2,), preferred (2,)"),
    (lambda: pair_margins([1.0, 2.0], [1, 1], [1, 1]), "group 1 has 2 rows, preferred [1, 1]: a pair is"),
    (lambda: pair_margins([1.0, 2.0, 3.0], [1, 1, 6], [1, -1, 0]), "group 6 has 1 rows, preferred [0]"),
    (lambda: pair_margins([1.0] * 4, [1] * 4, [1, -1, 1, -1]), "group 1 has 4 rows"),
]


def test_what_is_no_preference_is_refused_in_words() -> None:
    for mistake, message in MISTAKES:
        with pytest.raises(DataError, match=re.escape(message)):
            mistake()
    with pytest.raises(ConfigError, match="n = 1: must be greater than or equal to 2"):
        validate(PairSampling, {"n": 1}, "file.toml")
