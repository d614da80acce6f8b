"""A run that has ended goes on with more steps, after its last one, as if it had been of so many from the beginning."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.first_hour.terminal import Terminal

CONFIG = """
algorithm = "grpo"
steps = 6
prompts = 4
run = { name = "mine", resume = true, checkpoint_every = 2, samples_every = 1, meshes.main.cpus = 1 }
task = { source = "words.jsonl", held_out = 4, held_out_fraction = 0.2 }
sampling = { max_tokens = 5, n = 2 }
reward.function = "rewards.py:right_letters"
evaluation = { every = 3, n = 2 }
[policy]
model = { characters = "abcdefgh>", hidden_size = 16, ffn_size = 24, layers = 1, heads = 2, max_tokens = 16 }
optimizer = { lr = 1e-2, warmup_steps = 2, schedule = "linear", total_steps = 6 }
"""
REWARD = """
def right_letters(prompt, completion, row):
    return sum(one == other for one, other in zip(completion, row["answer"])) / 5
"""
FAKES = ("policy.backend=fake", "sampler.backend=fake", "reference.backend=fake")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    words = ["".join(random.Random(number).choices("abcdefgh", k=4)) for number in range(100)]
    rows = [{"question": f"{word}>", "answer": word[::-1]} for word in words]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "rewards.py").write_text(REWARD, "utf-8")
    (tmp_path / "mine.toml").write_text(CONFIG, "utf-8")
    return tmp_path


def lines(file: Path) -> list[dict[str, object]]:
    """Of a file of a run, without times."""
    found = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [{key: line[key] for key in line if not key.startswith("seconds") and key != "step_s"} for line in found]


def outcome(run: Path) -> Mapping[str, object]:
    """What a run has found and made, without times."""
    summary = json.loads((run / "summary.json").read_bytes())
    return {
        **{file: lines(run / f"{file}.jsonl") for file in ("metrics", "samples", "evaluations")},
        "summary": {key: summary[key] for key in summary if key != "wall_s"},
        "model": {
            f"{path.relative_to(run)} {name}": tensor.tobytes()
            for path in sorted(run.rglob("*.safetensors"))
            for name, tensor in load_file(path).items()
        },
    }


def test_a_run_that_ended_goes_on_to_the_bit(terminal: Terminal, project: Path) -> None:
    assert terminal("run", "mine.toml", "run.name=whole").status == 0
    assert terminal("run", "mine.toml", "steps=3").status == 0
    assert max(path.name for path in (project / "runs/mine/checkpoints").iterdir()) == "step-000003"

    status, _, err = terminal("run", "mine.toml")
    assert (status, "runs/mine continues after step 3 of 6" in err) == (0, True)
    assert sorted(path.name for path in (project / "runs").iterdir()) == ["mine", "whole"]
    assert outcome(project / "runs" / "mine")["model"]
    assert outcome(project / "runs" / "mine") == outcome(project / "runs" / "whole")


def test_a_run_that_ended_and_is_asked_for_no_more_is_as_it_was(terminal: Terminal, project: Path) -> None:
    assert terminal("run", "mine.toml", *FAKES)[0] == 0
    before = outcome(project / "runs" / "mine")
    assert [line["step"] for line in lines(project / "runs" / "mine" / "evaluations.jsonl")] == [0, 3, 6]
    status, _, err = terminal("run", "mine.toml", *FAKES)
    assert status == 0
    assert "runs/mine has 6 steps already, and steps = 6 asks for no more; set steps above 6" in err
    assert outcome(project / "runs" / "mine") == before
    assert terminal("audit", "mine")[0] == 0


def test_more_steps_train_on_other_prompts(terminal: Terminal, project: Path) -> None:
    for ahead in (0, 2):
        name = f"of-{ahead}"
        mine = ("mine.toml", *FAKES, f"ahead={ahead}", f"run.name={name}")
        assert terminal("run", *mine, "steps=3").status == 0
        status, _, err = terminal("run", *mine)
        assert status == 0
        assert "total_steps" not in err, "the schedule is the same, and nothing is told of it"
        assert len(lines(project / "runs" / name / "metrics.jsonl")) == 6
        status, out, _ = terminal("audit", name)
        assert status == 0, out
        assert "6 steps, resumed from a checkpoint 1 times" in out


def test_a_schedule_that_ended_is_told(terminal: Terminal, project: Path) -> None:
    ended = ("steps=3", "policy.optimizer.total_steps=3")
    assert terminal("run", "mine.toml", *FAKES, *ended)[0] == 0
    status, _, err = terminal("run", "mine.toml", *FAKES, "policy.optimizer.total_steps=3")
    assert status == 1
    assert "policy.optimizer.total_steps = 3: the learning rate is 0 after that, but the run makes 6 updates" in err
    status, _, err = terminal("run", "mine.toml", *FAKES)
    assert status == 0
    assert "total_steps was 3 and is 6: the learning rate has fallen toward 0 at 3, and continues" in err
    assert "A run that starts with total_steps = 6 gives other numbers" in err
