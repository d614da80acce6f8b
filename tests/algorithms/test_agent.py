"""GRPO over episodes of an agent: on a scripted sampler in virtual time, and on the torch backend as it ships."""

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from meshrl import Batch, Metrics, PolicyConfig, RunConfig, Task
from meshrl.config import validate
from meshrl.run import load_job, shipped_configs
from meshrl.run.batch_stats import statistics
from meshrl.run.jobs import load_script, shipped_scripts
from meshrl.testing import FakePolicy, FakeRun, ScriptedSampler, delayed, simulate
from meshrl.weights import Weights

AGENT = load_script(shipped_scripts()["agent"])
FAKE = {"backend": "fake", "model": "none"}
SOLVE = """
async def solve(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    told = await client.chat.completions.create(model="policy", messages=messages)
    return float(told.choices[0].message.content == row["answer"])
"""


class Learning(ScriptedSampler):
    """Says the number after the prompt's as often as the policy's skill has it, else nothing."""

    def __init__(self) -> None:
        random = Random(0)
        super().__init__(lambda prompt: str(int(prompt[6:8]) + 1) if random.random() < self.skill else "?")
        self.skill = 0.0

    async def load(self, weights: Weights) -> Batch:
        self.skill = float(next(iter(weights.tensors.values()))[0])
        return await super().load(weights)


def rows(first: int, count: int) -> Batch:
    numbers = range(first, first + count)
    return Batch.of(prompt=[str(n) for n in numbers], answer=[str(n + 1) for n in numbers], row=[{}] * count)


@pytest.fixture
def solve(tmp_path: Path) -> str:
    (tmp_path / "one_answer.py").write_text(SOLVE, "utf-8")
    return f"{tmp_path / 'one_answer.py'}:solve"


@pytest.mark.parametrize(("ahead", "credit"), [(0, "episode"), (2, "turns")])
def test_it_learns_and_is_judged_in_virtual_time(solve: str, ahead: int, credit: str) -> None:
    async def main() -> tuple[FakeRun, FakePolicy]:
        policy = delayed(FakePolicy, update=2.0)(PolicyConfig(model="none"))
        run = FakeRun(policy, delayed(Learning, generate=1.0)())
        table = {"task": {"source": "none"}, "policy": FAKE, "sampler": FAKE, "agent": {"source": solve}}
        chosen = {
            "credit": credit,
            "ahead": ahead,
            "prompts": 4,
            "steps": 12,
            "sampling": {"n": 4},
            "evaluation": {"every": 6},
        }
        task = Task(train=rows(10, 40), held_out=rows(60, 6))
        with patch.object(Task, "load", lambda _: task), patch.object(FakePolicy, "save"):
            await AGENT.function(run, validate(AGENT.schema, {**table, **chosen}, "test"))
        return run, policy

    run, policy = simulate(main)
    assert float(run.told["reward_sampled_before"]) < 0.6
    assert run.told["reward_sampled_after"] == run.told["reward_after"] == 1.0
    assert [line["step"] for line in run.evaluated] == [0, 6, 12]
    assert run.evaluated[-1]["eval/pass@1"] == 1.0
    assert len(policy.updates) == 12
    held_out = {f"user: {n}" for n in range(60, 66)}
    assert not any(str(text)[:8] in held_out for batch in policy.updates for text in batch.objects("prompt"))


class Recorded(FakeRun):
    """With the numbers of the batch, as a run on files has them. Its first step works."""

    async def record(self, metrics: Metrics, batch: Batch | None = None, **numbers: float) -> None:
        assert batch is not None
        await super().record(metrics, batch, **await statistics(batch, worked=bool(self.recorded)))


@pytest.mark.parametrize("asked", [0, 8])
def test_a_step_in_which_all_programs_fail_ends_no_run(
    asked: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Task(train=rows(10, 40), held_out=rows(60, 2))
    _, second = islice(task.batches(4, seed=0), 2)
    down = f"    if row['prompt'] in {second.objects('prompt')}:\n        raise OSError('a tool is down')\n"
    before = "    return" if asked else "    told"
    (tmp_path / "one_answer.py").write_text(SOLVE.replace(before, down + before), "utf-8")
    policy = FakePolicy(PolicyConfig(model="none"))
    run = Recorded(policy, Learning(), seed=0)
    table = {"task": {"source": "none"}, "policy": FAKE, "sampler": FAKE, "sampling": {"n": 2}}
    chosen = {"agent": {"source": f"{tmp_path / 'one_answer.py'}:solve"}, "prompts": 4, "steps": 3}

    async def main() -> None:
        with patch.object(Task, "load", lambda _: task), patch.object(FakePolicy, "save"):
            await AGENT.function(run, validate(AGENT.schema, {**table, **chosen}, "test"))

    simulate(main)
    assert [line["reward_errors"] for line in run.recorded] == [0, 8, 0]
    assert len(policy.updates) == (3 if asked else 2)
    told = capsys.readouterr().err
    assert f"nothing to learn from 8 episodes: 8 failed, and {asked} asked the model" in told
    assert "OSError: a tool is down" in told


def test_the_quickstart_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up makes a model with a chat template, and the agent goes on from it, with nothing changed between."""
    monkeypatch.chdir(tmp_path)
    small = ["task.options.size=2000", "task.held_out=4", "run.meshes.main={ranks=1,cpus=1}"]
    run_job("sft/agent", *small, "steps=2", "rows=4", "policy.optimizer.warmup_steps=1", "sampling.max_tokens=8")
    model = tmp_path / "runs" / "quickstart-agent-sft" / "model"
    assert "tool_calls" in (model / "chat_template.jinja").read_text("utf-8")

    summary = run_job("agent/quickstart", *small, "steps=2", "prompts=2", "sampling={n=2,max_tokens=8}")
    assert {"reward_before", "reward_after", "reward_sampled_before"} <= set(summary)
    folder = tmp_path / "runs" / "quickstart-agent"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["rows"] for line in lines] == [4, 4]
    assert all(line["tokens"] > 4 and line["turns"] >= 1 for line in lines)
    sample = json.loads((folder / "samples.jsonl").read_text("utf-8").splitlines()[0])
    assert {"prompt", "completion", "reward", "answer"} <= set(sample)


def test_the_quickstart_learns_on_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fakes = ["policy.backend=fake", "sampler.backend=fake", "task.options.size=500", "task.held_out=8"]
    summary = run_job("agent/quickstart", *fakes, "steps=20", "prompts=2")
    assert summary["reward_before"] == 0.0
    assert summary["reward_sampled_after"] == summary["reward_after"] == 1.0


def run_job(name: str, *overrides: str) -> dict[str, Any]:
    """The summary of a shipped configuration's run."""
    from meshrl.cli import main  # noqa: PLC0415

    with pytest.raises(SystemExit) as ended:
        main(["run", name, *overrides])
    assert ended.value.code == 0
    folder = load_job(shipped_configs()[name], list(overrides), RunConfig).run.name
    summary: dict[str, Any] = json.loads(Path("runs", folder, "summary.json").read_bytes())
    return summary
