import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

from meshrl import Batch, Metrics, PolicyConfig, RewardConfig, Run, RunConfig, SamplerConfig, Task
from meshrl.algo import Loss
from meshrl.errors import DataError, MeshrlError, RankFailed
from meshrl.observe.page import make_content
from meshrl.observe.run_files import read_run
from meshrl.testing import FakePolicy, FakeReward, FakeRun, FakeSampler, delayed, simulate
from tests.algorithms.pages import FAKE, FAKES, lines, numbers, play

TORCH = {"model": {"characters": "0123456789+=", "hidden_size": 16, "ffn_size": 24, "layers": 2, "heads": 2}}
TASK = Task(train=numbers(0, 40), held_out=numbers(40, 6))
HELD_OUT = TASK.held_out.objects("prompt")


async def trained(
    folder: Path, name: str, roles: dict[str, object], settings: dict[str, object], **chosen: object
) -> Path:
    config = RunConfig.model_validate({"folder": str(folder), "name": name, **settings})
    sizes = {"prompts": 4, "sampling": {"n": 2, "max_tokens": 4}}
    async with Run(config, {"evaluation": chosen.get("evaluation")}) as run:
        await play("grpo", run, {"task": {"source": "none"}, **sizes, **roles, **chosen}, TASK)
    return folder / name


ROLES: dict[str, object] = {**FAKES, "sampling": {"n": 2, "max_tokens": 16}}  # for an answer and its end


@pytest.mark.parametrize("ahead", [0, 2])
async def test_it_is_recorded_by_the_steps_done_and_in_the_end_for_each_prompt(tmp_path: Path, ahead: int) -> None:
    every = {"every": 4, "n": 3, "rows": 5}
    folder = await trained(tmp_path, "mine", ROLES, {}, ahead=ahead, steps=12, evaluation=every)
    found = lines(folder / "evaluations.jsonl")
    assert [line["step"] for line in found] == [0, 4, 8, 12]
    assert [line["eval/greedy"] for line in found][::3] == [0.0, 1.0]
    assert found[0]["eval/pass@1"] < found[-1]["eval/pass@1"] == found[-1]["eval/reward"] == 1.0
    for line in found:
        assert line["eval/pass@1"] <= line["eval/pass@2"] <= line["eval/pass@3"]
        assert line["step"] <= line["eval/version_oldest"] <= line["eval/version_newest"] <= 12
        assert (line["eval/prompts"], line["eval/truncated"], line["eval/reward_errors"]) == (5, 0, 0)
    samples = lines(folder / "samples.jsonl")
    kept = [line for line in samples if line.get("held_out")]
    assert [(line["step"], line["prompt"]) for line in kept] == [
        (step, prompt) for step in (0, 4, 8, 12) for prompt in HELD_OUT[:5]
    ]
    assert {line["reward"] for line in kept[-5:]} == {1.0}
    assert list(dict.fromkeys(line["step"] for line in samples if not line.get("held_out"))) == [0, 11]
    steps = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(12))
    assert not any(name.startswith("eval/") for line in steps for name in line)
    curves = {curve.name: curve for curve in make_content(read_run(folder)).curves}
    assert (curves["eval/greedy"].x, curves["eval/greedy"].y[-1]) == ([0, 4, 8, 12], 1.0)
    held_out, summary = lines(folder / "held_out.jsonl"), json.loads((folder / "summary.json").read_bytes())
    assert [line["prompt"] for line in held_out] == list(HELD_OUT)
    assert all(isinstance(line["completion"], str) for line in held_out)
    for kind, name in (("greedy", "exact_match_after"), ("sampled", "exact_match_sampled_after")):
        assert sum(line[kind] for line in held_out) / len(held_out) == pytest.approx(summary[name])


async def test_a_reward_that_raises_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    raises = "def judge(prompt, completion, row):\n    if int(prompt.partition('+')[0]) < 40:\n        return 0.0\n"
    (tmp_path / "broken.py").write_text(f"{raises}    raise ValueError('no')\n", "utf-8")
    roles = {**ROLES, "reward": {"function": f"{tmp_path}/broken.py:judge"}}
    folder = await trained(tmp_path, "mine", roles, {}, steps=1, evaluation={"every": 1, "n": 2})
    found = lines(folder / "evaluations.jsonl")
    assert [line["eval/reward_errors"] for line in found] == [18, 18]  # 6 greedy
    assert not {"eval/greedy", "eval/reward", "eval/pass@1", "eval/pass@2"} & {*found[0], *found[1]}, "means over none"


def updates(seconds: float, **chosen: object) -> tuple[list[Batch], list[dict[str, float]], float]:
    """What grpo trains on in virtual time, what evaluations found, and how long it took: an update takes 2 seconds."""

    async def script() -> tuple[list[Batch], list[dict[str, float]], float]:
        policy = delayed(FakePolicy, update=2.0)(PolicyConfig(model="none"))
        sampler = delayed(FakeSampler, generate=seconds)(SamplerConfig(model="none"))
        run = FakeRun(policy, sampler, FakeReward(RewardConfig()))
        with patch.object(FakePolicy, "save"):
            await play("grpo", run, {**ROLES, "prompts": 4, "steps": 8, "evaluation": None, **chosen}, TASK)
        return list(policy.updates), run.evaluated, asyncio.get_running_loop().time()

    return simulate(script)


def test_its_prompts_are_never_trained_on() -> None:
    for ahead in (0, 2):
        batches, found, _ = updates(0.25, ahead=ahead, evaluation={"every": 1, "n": 2})
        assert len(found) == 9
        prompts = {prompt for batch in batches for prompt in batch.objects("prompt")}
        assert prompts <= set(TASK.train.objects("prompt"))
        assert not prompts & set(HELD_OUT)
        assert [len(batch) for batch in batches] == [8] * 8


def test_steps_wait_for_one_that_is_not_over_when_the_next_is_due_or_where_they_are_told_to() -> None:
    """An evaluation takes 4.5 s, and a step 4 s; the last one comes after all steps."""
    batches, _, alone = updates(0.25)
    same, beside, took = updates(0.25, evaluation={"every": 4, "n": 2})
    assert took == alone + 4.5
    assert same == batches
    assert [line["step"] for line in beside] == [0, 4, 8]
    assert beside[0]["eval/version_newest"] > beside[0]["eval/version_oldest"]  # new weights came meanwhile
    _, often, took = updates(0.25, evaluation={"every": 1, "n": 2})
    assert took == alone + 8 * 0.5 + 4.5  # each step waits half a second
    assert [line["step"] for line in often] == list(range(9))
    same, paused, took = updates(0.25, evaluation={"every": 4, "n": 2, "pause_training": True})
    assert took == alone + 3 * 4.5
    assert [(line["eval/version_oldest"], line["eval/version_newest"]) for line in paused] == [(0, 0), (4, 4), (8, 8)]
    assert same == batches


async def test_a_run_that_goes_on_has_each_evaluation_once(tmp_path: Path) -> None:
    update, every = FakePolicy.update, {"every": 2, "n": 2, "pause_training": True}

    async def dying(self: FakePolicy, batch: Batch, loss: Loss) -> Metrics:
        if self.version == 5:
            raise RuntimeError("dead")
        return await update(self, batch, loss)

    async def ran(name: str, **settings: object) -> list[dict[str, float]]:
        settings = {"checkpoint_every": 4, **settings}
        return lines(await trained(tmp_path, name, ROLES, settings, steps=8, evaluation=every) / "evaluations.jsonl")

    whole = await ran("whole")
    assert [line["step"] for line in whole] == [0, 2, 4, 6, 8]
    with patch.object(FakePolicy, "update", dying), pytest.raises(RankFailed, match="dead"):
        await ran("killed")
    assert "exact_match_after" not in json.loads((tmp_path / "killed" / "summary.json").read_text("utf-8"))
    assert lines(tmp_path / "killed" / "evaluations.jsonl") == whole[:3]
    assert await ran("killed", resume=True) == whole


async def test_what_fails_in_it_ends_the_run_after_a_checkpoint_that_is_due(tmp_path: Path) -> None:
    update, score, due = FakePolicy.update, FakeReward.score, threading.Event()

    async def telling(self: FakePolicy, batch: Batch, loss: Loss) -> Metrics:
        metrics = await update(self, batch, loss)
        if self.version == 4:
            due.set()
        return metrics

    async def failing_then(self: FakeReward, batch: Batch) -> Batch:
        if batch.objects("prompt")[0] in HELD_OUT:
            await asyncio.to_thread(due.wait)
            raise RuntimeError("no idea")
        return await score(self, batch)

    async def ran(name: str, **settings: object) -> Path:
        settings, every = {"checkpoint_every": 4, **settings}, {"every": 4, "n": 2}
        return await trained(tmp_path, name, ROLES, settings, steps=8, evaluation=every)

    fails = pytest.raises(MeshrlError, match=r"(?s)the evaluation after 0 steps failed: RankFailed.*no idea")
    with patch.object(FakePolicy, "update", telling), patch.object(FakeReward, "score", failing_then), fails:
        await ran("mine")
    summary = json.loads((tmp_path / "mine" / "summary.json").read_bytes())
    assert summary["status"] == "failed"
    assert "the evaluation after 0 steps failed" in summary["error"]
    assert len(lines(tmp_path / "mine" / "metrics.jsonl")) == 4
    folder, whole = await ran("mine", resume=True), await ran("whole")
    assert [line["step"] for line in lines(folder / "evaluations.jsonl")] == [4, 8]
    assert lines(folder / "metrics.jsonl") == lines(whole / "metrics.jsonl")


@pytest.mark.bits
async def test_an_asynchronous_run_is_replayed_without_the_evaluation_that_was_beside_it(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def judge(prompt, text, row):\n    return sum(map(ord, text)) % 7\n", "utf-8")
    policy, reward = {**TORCH, "optimizer": {"lr": 1e-2}}, {"function": f"{tmp_path}/rewards.py:judge"}
    roles: dict[str, object] = {"policy": policy, "sampler": {**TORCH, "mesh": "rollout"}, "reward": reward}
    alone = {"meshes": {"main": {"cpus": 1}, "rollout": {"cpus": 1}}}
    recorded: dict[str, object] = {**alone, "deterministic": True}
    every = {"every": 1, "n": 2}
    first = await trained(tmp_path, "first", roles, recorded, steps=3, ahead=2, evaluation=every)
    again = await trained(tmp_path, "again", roles, {**alone, "replay": str(first)}, steps=3, ahead=2)
    assert (again / "model/model.safetensors").read_bytes() == (first / "model/model.safetensors").read_bytes()
    assert lines(again / "metrics.jsonl") == lines(first / "metrics.jsonl")
    assert [line["grad_norm"] > 0 for line in lines(first / "metrics.jsonl")] == [True] * 3
    assert len(lines(first / "evaluations.jsonl")) == 4
    assert not (again / "evaluations.jsonl").exists()


async def tuned(folder: Path, every: Mapping[str, object] | None, **settings: object) -> Path:
    table = {"task": {"source": "none"}, "policy": FAKE, "sampler": FAKE, "rows": 4, "steps": 9}
    async with Run(RunConfig.model_validate({"folder": str(folder), **settings})) as run:
        await play("sft", run, {**table, "evaluation": every}, TASK)
    return run.folder


async def test_a_replay_may_evaluate_otherwise_but_not_at_other_steps(tmp_path: Path) -> None:
    first = await tuned(tmp_path, {"every": 3, "n": 2}, name="first", deterministic=True)
    again = await tuned(tmp_path, {"every": 3, "n": 1, "pause_training": True}, name="again", replay=str(first))
    assert lines(again / "metrics.jsonl") == lines(first / "metrics.jsonl")
    found = lines(again / "evaluations.jsonl")
    assert [line["eval/version_oldest"] for line in found] == [line["step"] for line in found] == [0, 3, 6, 9]
    assert [line["eval/greedy"] for line in found][::3] == [0, 1]
    with pytest.raises(DataError, match=r"evaluation\.every = 3 there and nothing here"):
        await tuned(tmp_path, None, name="other", replay=str(first))


def test_a_greedy_run_is_sampled_all_the_same() -> None:
    _, found, _ = updates(0.0, sampling={"n": 2, "temperature": 0.0}, evaluation={"every": 8, "n": 8})
    assert found[0]["eval/greedy"] == 0
    assert 0 < found[0]["eval/pass@1"] < 1
