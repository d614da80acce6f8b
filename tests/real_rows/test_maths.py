"""Answers to problems in mathematics: `numeric_answer` is strict, and `math_answer` compares expressions."""

import numpy as np
import pytest

import meshrl as rl
from meshrl.data import Batch
from meshrl.tasks.builtin import numeric_answer
from meshrl.tasks.function import FunctionReward

EQUAL = [
    (r"\boxed{3.50 \text{ kg}}", "3.5"), (r"\boxed{12{,}000}", "12000"), (r"\boxed{2\,500}", "2500"),
    (r"\boxed{-2\frac{1}{4}}", "-2.25"), ("3 3/4", "15/4"), (r"\boxed{6.02 \times 10^{23}}", "6.02e23"),
    (r"\boxed{25\%}", "1/4"), ("#### -7", "-7"), (r"\boxed{1}, no: \boxed{2}", "2"), ("<think>9</think>8", "8"),
    (r"\boxed{\dfrac{-3}{4}}", "-3/4"), ("So the answer is $1,250.", "1250"), (r"\boxed{1.20e-3}", "0.0012"),
    (r"\boxed{\mathbf{7}}", "7"), (r"thus \(-5\).", "-5"), (r"\boxed{\text{7.5}}", "7.5"),
    ("#### 5 (five)", "5"), ("#### 5. Thousands pay", "5"), ("It costs 5. Hundreds pay it", "5"), ("42", "42"),
    ("The answer is 1,234.50 dollars.", "2469/2"), ("it lost -$5", "-5"), ("it is \N{MINUS SIGN}4", "-4"),
    ("x = -3", "-3"), ("10 - 3 = 7.", "7"), (".5", "1/2"), ("a rise of 50%", "50"),
    ("first 3, then\n#### 1,234 of 5", "1234"), (r"\boxed{\frac{1}{2}}, which is not 7", "1/2"),
    (r"1{,}234 or 1\,234", "1234"), (r"\boxed{1} or rather \boxed{-\dfrac{3}{4} \text{ m}}", "-3/4"),
]  # fmt: skip
DIFFERENT = [
    (r"\boxed{\{1, 2\}}", "2"), (r"\boxed{(0, 5]}", "5"), (r"\boxed{5 \text{ million}}", "5"), (r"\boxed{3x}", "3"),
    (r"\boxed{2 \pm 3}", "3"), (r"\boxed{\frac{5}{\sqrt{3}}}", "3"), (r"\boxed{5000\%}", "0.5"), ("7 - 3", "3"),
    (r"\boxed{4:3}", "3"), (r"\boxed{|{-4}|}", "-4"), (r"\boxed{1,23}", "123"), ("<think>so 8", "8"),
    (r"\boxed{2^{x}}", "2"), (r"\boxed{\log_2 8}", "8"), ("between 3 and 4", "3"),
    ("5 million", "5"), (r"\boxed{0.33...}", "0.33"), ("They are 3 dozen eggs", "3"),
    ("#### 5 million", "5"), ("#### **5** Millions", "5"), (r"#### 5 \text{ billion}", "5"), ("5 dozens", "5"),
    ("The answer is 5 Million", "5"), ("5 trillion", "5"), (r"\boxed{5 \text{ Trillions}}", "5"), ("none", "3"),
    ("", "0"), (r"\boxed{none}, not 3", "3"), ("1/0", "0"), ("9" * 101, "9" * 100),
]  # fmt: skip


@pytest.mark.parametrize(
    ("completion", "answer", "reward"), [*((*each, 1.0) for each in EQUAL), *((*each, 0.0) for each in DIFFERENT)]
)
def test_the_same_number_or_another_or_none(completion: str, answer: str, reward: float) -> None:
    assert numeric_answer("", completion, {"answer": answer}) == reward


@pytest.mark.parametrize("answer", [r"\frac{\sqrt{3}}{2}", r"2\pi", "(1, 2)", "x"])
def test_an_answer_that_is_no_number_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="no number to compare with"):
        numeric_answer("", r"\boxed{2}", {"answer": answer})


async def test_math_answer_compares_expressions() -> None:
    pytest.importorskip("math_verify")
    answers = [r"$\frac{1}{2}$", r"\frac{\sqrt{3}}{2}", r"\{1, 2\}", "(0, 1]", r"2\sqrt{2}"]
    completions = ["It is $0.5$", r"\boxed{\sqrt{3}/2}", r"\boxed{\{2, 1\}}", r"\boxed{[0, 1]}", r"\boxed{\sqrt{8}}"]
    batch = Batch.of(prompt=[""] * 5, completion=completions, answer=answers, row=[{}] * 5)
    scored = await FunctionReward(rl.RewardConfig(function="math_answer")).score(batch)
    assert scored.rewards.tolist() == [1, 1, 1, 0, 1]
    assert scored.objects("reward_error") == (None,) * 5


@pytest.mark.wide
@pytest.mark.parametrize("completion", [r"\boxed{10000000000000000000!}", "$9^{9^{9^{9^9}}}$"])
async def test_what_math_verify_gives_up_is_unknown(completion: str) -> None:
    pytest.importorskip("math_verify")
    batch = Batch.of(prompt=[""], completion=[completion], answer=["5"], row=[{}])
    scored = await FunctionReward(rl.RewardConfig(function="math_answer")).score(batch)
    assert np.isnan(scored.rewards[0])
    assert "gave up after 5 seconds" in str(scored.objects("reward_error")[0])
