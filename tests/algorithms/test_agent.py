"""GRPO over episodes of an agent, on a scripted sampler in virtual time, and as it ships on fakes."""

import json
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest

from meshrl import Batch, Metrics, PolicyConfig, Task
from meshrl.data import Weights
from meshrl.run.recorder import statistics
from meshrl.testing import FakePolicy, FakeRun, ScriptedSampler, delayed, simulate
from tests.algorithms.pages import FAKE, meshrl, numbers, play

GIVEN = {"task": {"source": "none"}, "policy": FAKE, "sampler": FAKE, "prompts": 4}
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


def program(folder: Path, text: str = SOLVE) -> dict[str, object]:
    (folder / "one_answer.py").write_text(text, "utf-8")
    return {"source": f"{folder / 'one_answer.py'}:solve"}


def test_it_learns_and_is_judged_in_virtual_time(tmp_path: Path) -> None:
    async def main(ahead: int, credit: str) -> tuple[FakeRun, FakePolicy]:
        policy = delayed(FakePolicy, update=2.0)(PolicyConfig(model="none"))
        run = FakeRun(policy, delayed(Learning, generate=1.0)())
        chosen = {"agent": program(tmp_path), "credit": credit, "ahead": ahead, "steps": 12}
        with patch.object(FakePolicy, "save"):
            table = {**GIVEN, **chosen, "sampling": {"n": 4}, "evaluation": {"every": 6}}
            await play("agent", run, table, Task(train=numbers(10, 40), held_out=numbers(60, 6)))
        return run, policy

    for ahead, credit in ((0, "episode"), (2, "turns")):
        run, policy = simulate(partial(main, ahead, credit))
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
    task = Task(train=numbers(10, 40), held_out=numbers(60, 2))
    _, second = islice(task.batches(4, seed=0), 2)
    down = f"    if row['prompt'] in {second.objects('prompt')}:\n        raise OSError('a tool is down')\n"
    before = "    return" if asked else "    told"
    policy = FakePolicy(PolicyConfig(model="none"))
    run = Recorded(policy, Learning(), seed=0)
    agent = program(tmp_path, SOLVE.replace(before, down + before))

    async def main() -> None:
        with patch.object(FakePolicy, "save"):
            await play("agent", run, {**GIVEN, "sampling": {"n": 2}, "agent": agent, "steps": 3}, task)

    simulate(main)
    assert [line["reward_errors"] for line in run.recorded] == [0, 8, 0]
    assert len(policy.updates) == (3 if asked else 2)
    told = capsys.readouterr().err
    assert f"nothing to learn from 8 episodes: 8 failed, and {asked} asked the model" in told
    assert "OSError: a tool is down" in told


def test_the_quickstart_learns_on_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fakes = ["policy.backend=fake", "sampler.backend=fake", "task.options.size=500", "task.held_out=8"]
    assert meshrl("run", "agent/quickstart", *fakes, "steps=20", "prompts=2") == 0
    summary = json.loads(Path("runs/quickstart-agent/summary.json").read_bytes())
    assert summary["reward_before"] == 0.0
    assert summary["reward_sampled_after"] == summary["reward_after"] == 1.0
