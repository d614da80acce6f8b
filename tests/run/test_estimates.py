"""pass@k and intervals against their definitions, and `meshrl eval` on a tiny model."""

import json
import math
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshrl.errors import DataError
from meshrl.run.evaluation import bootstrap, mean_of, pass_at_k, wilson
from tests.first_hour.terminal import done, refused

ROWS = "".join(json.dumps({"question": f"{a}{b}>", "answer": f"{b}{a}"}) + "\n" for a in "abcd" for b in "abcd")
CONFIG = """
algorithm = "sft"
rows = 8
steps = 2
run = { name = "mine", meshes.main.cpus = 1 }
task = { source = "rows.jsonl", held_out = 3, held_out_fraction = 0.4 }
policy.model = { characters = "abcd>", hidden_size = 16, ffn_size = 32, layers = 1, heads = 2, max_tokens = 16 }
sampling.max_tokens = 3
"""


def test_pass_at_k_is_one_minus_the_share_of_choices_without_a_right_one() -> None:
    for n in (1, 2, 5):
        counts = np.arange(n + 1)
        for k in range(1, n + 1):
            expected = [float(1 - Fraction(math.comb(n - c, k), math.comb(n, k))) for c in counts.tolist()]
            np.testing.assert_allclose(pass_at_k(counts, n, k), expected, atol=1e-14)
            chosen = [any(pick < 2 for pick in picks) for picks in combinations(range(n), k)]
            if n >= 2:
                assert pass_at_k([2], n, k)[0] == pytest.approx(np.mean(chosen))
    (found,) = pass_at_k([3], 10_000, 100)  # it does not overflow
    exact = 1 - Fraction(math.comb(9_997, 100), math.comb(10_000, 100))
    assert found == pytest.approx(float(exact), rel=1e-9)
    with pytest.raises(DataError, match=r"pass@3 of 2 completions for each prompt: k must be from 1 to 2"):
        pass_at_k([1], 2, 3)
    with pytest.raises(DataError, match=r"counts from 1 to 4 of 3 completions"):
        pass_at_k([1, 4], 3, 1)


def test_wilsons_bounds_are_where_the_score_test_just_accepts() -> None:
    """Each bound b solves (share - b)^2 = z^2 b (1 - b) / n."""
    for right, of in ((0, 10), (1, 10), (8, 10), (10, 10), (500, 1000)):
        found = wilson(right, of)
        assert found.value == right / of
        for b in (found.low, found.high):
            assert (found.value - b) ** 2 == pytest.approx(1.959963984540054**2 * b * (1 - b) / of, abs=1e-12)
        assert 0 <= found.low <= found.value <= found.high <= 1
    with pytest.raises(DataError, match="there must be at least one trial"):
        wilson(0, 0)


def test_the_bootstraps_interval_is_seeded_and_as_wide_as_theory_says() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    found = bootstrap(values, seed=1)
    assert found == bootstrap(values, seed=1) != bootstrap(values, seed=2)
    assert found.value == pytest.approx(values.mean())
    width = 2 * 1.96 * values.std() / math.sqrt(400)
    assert found.high - found.low == pytest.approx(width, rel=0.1)
    with pytest.raises(DataError, match="no prompt was measured"):
        bootstrap([], seed=0)
    assert mean_of([0, 0, 1], seed=1) == wilson(1, 3), "a share, which is not certain if all are 0"
    assert mean_of(values, seed=1) == found


def evaluate(*arguments: str) -> tuple[str, dict[str, Any]]:
    shown = done("eval", "mine", *arguments).out
    return shown, json.loads(Path("runs/mine/eval.json").read_bytes())


def test_eval_judges_what_a_run_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the model is a real one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    Path("rows.jsonl").write_text(ROWS)
    Path("mine.toml").write_text(CONFIG)
    Path("judge.py").write_text('def has_a(prompt, completion, row):\n    return float("a" in completion)\n')
    done("run", "mine.toml")

    shown, first = evaluate("--n", "4")
    names = ("greedy", "pass@1", "pass@2", "pass@4", "mean reward", "eval.json")
    assert [name for name in names if name not in shown] == []
    assert (first["model"], first["task"], first["prompts"], first["n"]) == ("model", "held out by the run", 3, 4)
    assert evaluate("--n", "4")[1] == first

    _, other = evaluate("rows.jsonl", "--reward", "judge.py:has_a", "--n", "3", "--rows", "10")
    assert (other["task"], other["prompts"], other["reward_errors"]) == ("rows.jsonl", 10, 0)
    passed = {k: found["value"] for k, found in other["pass_at"].items()}
    assert list(passed) == ["1", "2", "3"]
    assert passed["1"] == pytest.approx(other["reward"]["value"])  # a reward of 0 or 1
    assert passed["1"] < passed["3"]

    Path("rows.jsonl").unlink()
    assert "there is no file" in refused("eval", "mine")
