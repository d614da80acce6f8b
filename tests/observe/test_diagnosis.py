import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from operator import mul
from pathlib import Path

import numpy as np
import pytest

from meshrl.observe import STEPS, diagnose, read_numbers
from tests.first_hour.terminal import type_in

ROOT = Path(__file__).parents[2]
COUNT = 200
At = Callable[[float], float]
"""A number when this share of a run is done."""


def learns(done: float) -> float:
    return 0.1 + 0.5 * (1 - math.exp(-5 * done))


HEALTHY: Mapping[str, At] = {
    "loss": lambda _: 0.1,
    "grad_norm": lambda _: 1.0,
    "rows": lambda _: 64.0,
    "reward": learns,
    "reward_errors": lambda _: 0.0,
    "unknown_rewards": lambda _: 0.0,
    "zero_std_groups": lambda done: 0.6 - 0.3 * done,
    "entropy": lambda done: 1.5 - done,
    "clip_fraction": lambda done: 0.02 * done,
    "sampler_difference": lambda _: 0.01,
    "effective_sample_size": lambda _: 0.9,
    "staleness": lambda _: 1.0,
    "completion_tokens": lambda done: 100 + 60 * done,
    "truncated": lambda done: 0.02 + 0.05 * done,
}
HELD_OUT: Mapping[str, At] = {"eval/greedy": learns, "eval/prompts": lambda _: 200.0}

PLANTED: Mapping[str, Mapping[str, At]] = {
    "no number": {"loss": lambda done: 0.1 if done < 0.7 else float("nan")},
    "reward errors": {"reward_errors": lambda _: 6.0},
    "unknown rewards": {"reward_errors": lambda _: 6.0, "unknown_rewards": lambda _: 0.1},
    "collapse": {
        "reward": lambda done: learns(done) if done < 0.6 else 0.15,
        "eval/greedy": lambda done: learns(done) if done < 0.6 else 0.15,
    },
    "reward hacking": {"reward": lambda done: 0.2 + 0.7 * done, "eval/greedy": lambda done: 0.5 - abs(done - 0.4)},
    "entropy collapse": {"entropy": lambda done: 1.5 * math.exp(-6 * done)},
    "groups without signal": {"zero_std_groups": lambda done: 0.5 + 0.5 * done},
    "clipped tokens": {"clip_fraction": lambda done: 0.5 * done},
    "sampler apart": {"sampler_difference": lambda _: 0.2},
    "stale rows": {"effective_sample_size": lambda done: 1 - 0.8 * done, "staleness": lambda _: 7.0},
    "length growth": {"truncated": lambda done: 0.5 * done, "completion_tokens": lambda done: 100 + 900 * done},
}


def run_of(folder: Path, otherwise: Mapping[str, At], *, noise: float = 0.1, seed: int = 0, count: int = COUNT) -> Path:
    """The files of a run whose numbers are these, with noise as of small batches, and an evaluation each tenth step."""
    luck = np.random.default_rng(seed)

    def line(numbers: Mapping[str, At], step: int) -> str:
        exact = {name: otherwise.get(name, at)(step / count) for name, at in numbers.items()}
        noisy = {name: value * (1 + noise * luck.uniform(-1, 1)) for name, value in exact.items()}
        known = {name: value if math.isfinite(value) else None for name, value in noisy.items()}
        return json.dumps({"step": step, **known}) + "\n"

    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(line(HEALTHY, step) for step in range(count)), "utf-8")
    (folder / "evaluations.jsonl").write_text("".join(line(HELD_OUT, step) for step in range(0, count, 10)), "utf-8")
    return folder


def signs(folder: Path) -> list[str]:
    return [finding.name for finding in diagnose(read_numbers(folder))]


def test_each_planted_fault_is_found_and_nothing_else_and_has_its_section(tmp_path: Path) -> None:
    found = {(sign, seed): signs(run_of(tmp_path, PLANTED[sign], seed=seed)) for sign in PLANTED for seed in range(3)}
    assert found == {(sign, seed): [sign] for sign, seed in found}
    page = (ROOT / "docs/diagnose.md").read_text("utf-8")
    headings = [line.removeprefix("## ").lower() for line in page.splitlines() if line.startswith("## ")]
    assert headings == list(PLANTED)


SOLVED: Mapping[str, At] = {
    "reward": lambda done: min(0.98, 2 * done),
    "eval/greedy": lambda done: min(0.99, 2 * done),
    "entropy": lambda done: 1.5 * math.exp(-6 * done),
    "zero_std_groups": lambda done: min(0.97, 2 * done),
}
LONGER: Mapping[str, At] = {"completion_tokens": lambda done: 100 + 400 * done}
NEGATIVE: Mapping[str, At] = {"reward": lambda done: -5 + 4 * done}
UNLUCKY: Mapping[str, At] = {"eval/greedy": lambda done: 0.3 + 0.02 * math.sin(30 * done)}
"""Held-out prompts that stay as they were, while the training prompts are learned."""


REAL = Path(__file__).parent / "healthy"
"""Real runs of five algorithms with nothing wrong; the README there says how they were made."""


FAILS: Mapping[str, At] = {"rows": lambda done: 640.0 if done > 0.9 else 8.0}
MASKED: Mapping[str, At] = {**FAILS, "reward_errors": lambda done: 6.0 * (done > 0.9)}
"""Batches of several sizes: what is unknown in the large ones is a small part of all."""


def test_rows_are_counted_and_not_steps(tmp_path: Path) -> None:
    rare = {**MASKED, "unknown_rewards": lambda done: 6.0 / 640 * (done > 0.9)}
    often = {
        **FAILS,
        "reward_errors": lambda done: 4.0 * (done <= 0.9),
        "unknown_rewards": lambda done: 0.5 * (done <= 0.9),
    }
    for otherwise in (rare, often):
        assert signs(run_of(tmp_path, otherwise, noise=0)) == (["unknown rewards"] if otherwise is often else [])


def test_healthy_runs_have_no_sign(tmp_path: Path) -> None:
    for otherwise in ({}, SOLVED, LONGER, NEGATIVE, UNLUCKY):
        for seed in range(3):
            assert signs(run_of(tmp_path, otherwise, noise=0.05, seed=seed)) == []
    for run in ("sft", "dpo", "grpo", "rloo", "ppo"):
        record = read_numbers(REAL / run)
        assert len(record.metrics) >= 2 * STEPS
        assert {"loss", "entropy"} <= record.metrics[0].keys()
        assert diagnose(record) == ()
    lines = [{"step": step, "loss": 2 - step / 100, "entropy": 2 * 0.97**step} for step in range(COUNT)]
    (folder := tmp_path / "of a loss without rewards").mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    assert signs(folder) == []


def test_a_task_that_the_summary_calls_solved_has_no_sign_of_an_unsolved_one(tmp_path: Path) -> None:
    ended = ("entropy collapse", "groups without signal", "length growth")
    folder = run_of(tmp_path, {name: at for sign in ended for name, at in PLANTED[sign].items()})
    (folder / "evaluations.jsonl").unlink()
    for told, found in (({"reward_after": 0.94}, []), ({"reward_after": 0.4}, [*ended]), ({}, [*ended])):
        (folder / "summary.json").write_text(json.dumps(told), "utf-8")
        assert signs(folder) == found


def test_rewards_above_1_do_not_tell_whether_a_task_is_solved(tmp_path: Path) -> None:
    planted = {name: at for sign in ("entropy collapse", "groups without signal") for name, at in PLANTED[sign].items()}
    for most, told in ((0.5, "and the task is not solved"), (2.0, "do not tell whether the task is")):
        folder = run_of(tmp_path, {**planted, "reward": partial(mul, most)}, noise=0)
        (folder / "evaluations.jsonl").unlink()
        found = {each.name: each.evidence for each in diagnose(read_numbers(folder))}
        assert told in found["entropy collapse"]
        assert told in found["groups without signal"]


def test_the_command_tells_the_numbers_and_whether_a_run_is_short_healthy_or_missing(tmp_path: Path) -> None:
    found = type_in("diagnose", str(run_of(tmp_path, PLANTED["reward hacking"], noise=0)))
    assert found.status == 1
    assert "since step 80 `reward` has risen from 0.478 to" in found.out
    assert "has fallen from 0.5 to" in found.out
    assert "see: docs/diagnose.md#reward-hacking" in found.out
    found = type_in("diagnose", str(run_of(tmp_path, {}, count=STEPS - 1)))
    told = f"{STEPS - 1} steps are too few for a diagnosis, which needs {STEPS}"
    assert (found.status, told in found.err) == (2, True)
    found = type_in("diagnose", str(run_of(tmp_path, {})))
    assert (found.status, "no warning sign in 200 steps" in found.out) == (0, True)
    found = type_in("diagnose", str(tmp_path / "nosuch"))
    assert (found.status, "nosuch: no such run" in found.err) == (2, True)


def test_a_run_tells_at_its_end_what_its_numbers_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hard.py").write_text("def reward(prompt, completion, row):\n    return 0.0\n", "utf-8")
    small = ("task.options={size = 100}", "task.held_out=4", "prompts=4", f"steps={STEPS}", "run.engine=local")
    fakes = ("policy.backend=fake", "sampler.backend=fake", "reward={function = 'hard.py:reward'}")
    found = type_in("run", "grpo/quickstart", *small, *fakes)
    assert found.status == 0
    told = "groups without signal: in 100% of the groups all completions have the same reward, with a mean of 0"
    assert told in found.out
