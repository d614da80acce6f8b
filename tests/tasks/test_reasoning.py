"""The rewards of reasoning: numbers by their value, thought apart from the answer, and texts that mean harm."""

from fractions import Fraction

import pytest

from meshrl.tasks.builtin import final_number, numeric_answer, reasoning_format

NUMBERS: dict[str, Fraction | int | None] = {
    "42": 42,
    "The answer is 1,234.50 dollars.": Fraction(2469, 2),
    "it lost -$5": -5,
    "it is \N{MINUS SIGN}4": -4,
    "x = -3": -3,
    "7-3": 3,
    "10 - 3 = 7.": 7,
    "1/2": Fraction(1, 2),
    ".5": Fraction(1, 2),
    "a rise of 50%": 50,
    "first 3, then\n#### 1,234 of 5": 1234,
    "\\boxed{\\frac{1}{2}}, which is not 7": Fraction(1, 2),
    "\\boxed{1} or rather \\boxed{-\\dfrac{3}{4} \\text{ m}}": Fraction(-3, 4),
    "1{,}234 or 1\\,234": 1234,
    "<think>7 or 8</think>It is 9.": 9,
    "<think>7 or 8": None,
    "none": None,
    "\\boxed{none}, not 3": None,
    "1/0": None,
    "9" * 101: None,
    "": None,
}


def test_the_number_that_a_text_gives_as_its_answer() -> None:
    assert {text: final_number(text) for text in NUMBERS} == NUMBERS


def test_answers_are_compared_by_value() -> None:
    gsm8k: dict[str, object] = {"answer": "He has 3 boxes of 14, so <<3*14=42>>42.\n#### 42"}
    assert numeric_answer("", "3 * 14 = 42.0", gsm8k) == 1.0
    assert numeric_answer("", "42 is not what I think, but 41", gsm8k) == 0.0
    assert numeric_answer("", "", gsm8k) == 0.0
    with pytest.raises(ValueError, match="the row's answer has no number"):
        numeric_answer("", "42", {"answer": "many"})


FORMATS = {
    "<think>3 and 4</think>7": 1.0,
    "\n<think>\n3 and 4\n</think>\n\nIt is 7.": 1.0,
    "3 and 4</think>7": 1.0,  # the template opened the thought
    "7": 0.0,
    "<think>3 and 4": 0.0,
    "<think></think>7": 0.0,
    "<think>3 and 4</think> ": 0.0,
    "It is 7. <think>3 and 4</think>7": 0.0,
    "<think>3</think>7<think>4</think>7": 0.0,
    "<think>3</think>7</think>": 0.0,
}


def test_thought_and_answer_are_told_apart() -> None:
    assert {text: reasoning_format("", text, {}) for text in FORMATS} == FORMATS


def test_a_long_text_takes_time_in_proportion() -> None:
    for piece in ("1,", "1,111", "\\boxed{", "<think>", "9", "-", ".1", "1/", "\\frac{1}{"):
        final_number(piece * 200_000)
        assert reasoning_format("", piece * 200_000, {}) == 0.0
