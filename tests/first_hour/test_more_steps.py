"""A run that has ended goes on with more steps, after its last one, as if it had been of so many from the beginning."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.algorithms.pages import lines
from tests.first_hour.terminal import done

CONFIG = """
algorithm = "grpo"
steps = 6
prompts = 4
run = { name = "mine", resume = true, checkpoint_every = 2, samples_every = 1, meshes.main.cpus = 1 }
task = { source = "words.jsonl", held_out = 4, held_out_fraction = 0.2 }
sampling = { max_tokens = 5, n = 2 }
reward.function = "rewards.py:right_letters"
evaluation = { every = 3, n = 2, pause_training = true }
[policy]
model = { characters = "abcdefgh>", hidden_size = 16, ffn_size = 24, layers = 1, heads = 2, max_tokens = 16 }
optimizer = { lr = 1e-2, warmup_steps = 2, schedule = "linear", total_steps = 6 }
"""
REWARD = """
def right_letters(prompt, completion, row):
    return sum(one == other for one, other in zip(completion, row["answer"])) / 5
"""
ON_FAKES = ("run", "mine.toml", "policy.backend=fake", "sampler.backend=fake", "reference.backend=fake")
MINE = Path("runs/mine")


@pytest.fixture(autouse=True)
def _project() -> None:
    words = ["".join(random.Random(number).choices("abcdefgh", k=4)) for number in range(100)]
    rows = [{"question": f"{word}>", "answer": word[::-1]} for word in words]
    Path("words.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    Path("rewards.py").write_text(REWARD, "utf-8")
    Path("mine.toml").write_text(CONFIG, "utf-8")


def outcome(run: Path) -> Mapping[str, object]:
    summary = json.loads((run / "summary.json").read_bytes())
    return {
        **{file: lines(run / f"{file}.jsonl") for file in ("metrics", "samples", "evaluations")},
        "summary": {key: summary[key] for key in summary if key != "wall_s"},
        "model": {path.relative_to(run): path.read_bytes() for path in run.rglob("*.safetensors")},
    }


def test_a_run_that_ended_goes_on_to_the_bit() -> None:
    done("run", "mine.toml", "run.name=whole")
    done("run", "mine.toml", "steps=3")
    assert max(path.name for path in (MINE / "checkpoints").iterdir()) == "step-000003"
    assert "runs/mine continues after step 3 of 6" in done("run", "mine.toml").err
    assert sorted(path.name for path in MINE.parent.iterdir()) == ["mine", "whole"]
    assert outcome(MINE)["model"]
    assert outcome(MINE) == outcome(MINE.with_name("whole"))


def test_a_run_that_ended_and_is_asked_for_no_more_is_as_it_was() -> None:
    done(*ON_FAKES)
    before = outcome(MINE)
    assert [line["step"] for line in lines(MINE / "evaluations.jsonl")] == [0, 3, 6]
    told = "runs/mine has 6 steps already, and steps = 6 asks for no more; set steps above 6"
    assert told in done(*ON_FAKES).err
    assert outcome(MINE) == before
    done("audit", "mine")


def test_more_steps_train_on_other_prompts() -> None:
    for name, ahead in (("in-turns", 0), ("overlapped", 2)):
        mine = (*ON_FAKES, f"ahead={ahead}", f"run.name={name}")
        done(*mine, "steps=3")
        assert "total_steps" not in done(*mine).err, "the schedule is the same, and nothing is told of it"
        assert len(lines(MINE.with_name(name) / "metrics.jsonl")) == 6
        assert "6 steps, resumed from a checkpoint 1 times" in done("audit", name).out


def test_a_schedule_that_ended_is_told() -> None:
    ended = "policy.optimizer.total_steps=3"
    done(*ON_FAKES, ended, "steps=3")
    told = done(*ON_FAKES).err
    assert "total_steps was 3 and is 6: the learning rate has fallen toward 0 at 3, and continues" in told
    assert "A run that starts with total_steps = 6 gives other numbers" in told
