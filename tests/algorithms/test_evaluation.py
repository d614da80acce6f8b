"""Evaluation beside training: it is recorded, it overlaps, and what is trained is the same with and without it."""

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

from meshrl import Batch, Metrics, PolicyConfig, RewardConfig, Run, RunConfig, SamplerConfig, Task
from meshrl.errors import DataError, MeshrlError, RankFailed
from meshrl.losses import Loss
from meshrl.report.content import make_content
from meshrl.report.reading import read_run
from meshrl.testing import FakePolicy, FakeReward, FakeRun, FakeSampler, delayed, simulate
from tests.algorithms.pages import FAKE, FAKES, lines, numbers, play

TORCH = {"model": {"characters": "0123456789+=", "hidden_size": 16, "ffn_size": 24, "layers": 2, "heads": 2}}
ALONE: dict[str, object] = {"meshes": {"main": {"cpus": 1}, "rollout": {"cpus": 1}}}
"""A sampler on a mesh of its own."""
TASK = Task(train=numbers(0, 40), held_out=numbers(40, 6))
HELD_OUT = TASK.held_out.objects("prompt")


async def train(run: Run | FakeRun, roles: dict[str, object], **chosen: object) -> None:
    sizes = {"prompts": 4, "sampling": {"n": 2, "max_tokens": 4}}
    await play("grpo", run, {"task": {"source": "none"}, **sizes, **roles, **chosen}, TASK)


async def trained(
    folder: Path, name: str, roles: dict[str, object], settings: dict[str, object], **chosen: object
) -> Path:
    config = RunConfig.model_validate({"folder": str(folder), "name": name, **settings})
    async with Run(config, {"evaluation": chosen.get("evaluation")}) as run:
        await train(run, roles, **chosen)
    return folder / name


def fakes() -> dict[str, object]:
    roomy = {"n": 2, "max_tokens": 16}  # for an answer and its end
    return {**FAKES, "sampling": roomy}


@pytest.mark.parametrize("ahead", [0, 2])
async def test_it_is_recorded_by_the_steps_that_were_done(tmp_path: Path, ahead: int) -> None:
    every = {"every": 4, "n": 3, "rows": 5}
    folder = await trained(tmp_path, "mine", fakes(), {}, ahead=ahead, steps=12, evaluation=every)
    found = lines(folder / "evaluations.jsonl")
    assert [line["step"] for line in found] == [0, 4, 8, 12]
    assert [line["eval/greedy"] for line in found][::3] == [0.0, 1.0]
    assert found[0]["eval/pass@1"] < found[-1]["eval/pass@1"] == found[-1]["eval/reward"] == 1.0
    for line in found:
        assert line["eval/pass@1"] <= line["eval/pass@2"] <= line["eval/pass@3"]
        assert line["step"] <= line["eval/version_oldest"] <= line["eval/version_newest"] <= 12
        assert (line["eval/prompts"], line["eval/truncated"], line["eval/reward_errors"]) == (5, 0, 0)
    steps = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(12))
    assert not any(name.startswith("eval/") for line in steps for name in line)
    curves = {curve.name: curve for curve in make_content(read_run(folder)).curves}
    assert (curves["eval/greedy"].x, curves["eval/greedy"].y[-1]) == ([0, 4, 8, 12], 1.0)


async def test_a_reward_that_raises_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    raises = "def judge(prompt, completion, row):\n    if int(prompt.partition('+')[0]) < 40:\n        return 0.0\n"
    (tmp_path / "broken.py").write_text(f"{raises}    raise ValueError('no')\n", "utf-8")
    roles = {**fakes(), "reward": {"function": f"{tmp_path}/broken.py:judge"}}
    folder = await trained(tmp_path, "mine", roles, {}, steps=1, evaluation={"every": 1, "n": 2})
    assert [line["eval/reward_errors"] for line in lines(folder / "evaluations.jsonl")] == [18, 18]  # 6 greedy


def updates(seconds: float, **chosen: object) -> tuple[list[Batch], list[dict[str, float]], float]:
    """What grpo trains on in virtual time, what evaluations found, and how long it took: an update takes 2 seconds.

    A row takes `seconds`, as many as there are at once.
    """

    async def script() -> tuple[list[Batch], list[dict[str, float]], float]:
        policy = delayed(FakePolicy, update=2.0)(PolicyConfig(model="none"))
        sampler = delayed(FakeSampler, generate=seconds)(SamplerConfig(model="none"))
        run = FakeRun(policy, sampler, FakeReward(RewardConfig()))
        with patch.object(FakePolicy, "save"):
            await train(run, fakes(), **{"steps": 8, "evaluation": None, **chosen})
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
        return lines(await trained(tmp_path, name, fakes(), settings, steps=8, evaluation=every) / "evaluations.jsonl")

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
        chosen: dict[str, object] = {"steps": 8, "evaluation": {"every": 4, "n": 2}}
        return await trained(tmp_path, name, fakes(), {"checkpoint_every": 4, **settings}, **chosen)

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


def torch_roles(folder: Path) -> dict[str, object]:
    (folder / "rewards.py").write_text("def judge(prompt, text, row):\n    return sum(map(ord, text)) % 7\n", "utf-8")
    policy = {**TORCH, "optimizer": {"lr": 1e-2}}
    reward = {"function": f"{folder}/rewards.py:judge"}
    return {"policy": policy, "sampler": {**TORCH, "mesh": "rollout"}, "reward": reward}


def outcome(folder: Path) -> tuple[list[dict[str, float]], bytes]:
    return lines(folder / "metrics.jsonl"), (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.bits
async def test_an_asynchronous_run_is_replayed_without_the_evaluation_that_was_beside_it(tmp_path: Path) -> None:
    chosen: dict[str, object] = {"steps": 3, "ahead": 2}
    every = {"every": 1, "n": 2}
    recorded = {**ALONE, "deterministic": True}
    first = await trained(tmp_path, "first", torch_roles(tmp_path), recorded, **chosen, evaluation=every)
    again = await trained(tmp_path, "again", torch_roles(tmp_path), {**ALONE, "replay": str(first)}, **chosen)
    assert outcome(again) == outcome(first)
    assert [line["grad_norm"] > 0 for line in outcome(first)[0]] == [True] * 3
    assert len(lines(first / "evaluations.jsonl")) == 4
    assert not (again / "evaluations.jsonl").exists()


async def tuned(folder: Path, every: Mapping[str, object] | None, **settings: object) -> Path:
    """A run of `sft`, which publishes weights for an evaluation alone."""
    table = {"task": {"source": "none"}, "policy": FAKE, "sampler": FAKE, "rows": 4, "steps": 9}
    async with Run(RunConfig.model_validate({"folder": str(folder), **settings})) as run:
        await play("sft", run, {**table, "evaluation": every}, TASK)
    return run.folder


async def test_a_replay_may_evaluate_otherwise_but_not_at_other_steps(tmp_path: Path) -> None:
    first = await tuned(tmp_path, {"every": 3, "n": 2}, name="first", deterministic=True)
    again = await tuned(tmp_path, {"every": 3, "n": 1, "pause_training": True}, name="again", replay=str(first))
    assert lines(again / "metrics.jsonl") == lines(first / "metrics.jsonl")
    assert len(lines(again / "evaluations.jsonl")) == 4
    for every, told in (({"every": 4}, "4"), (None, "nothing")):
        with pytest.raises(DataError, match=f"evaluation.every = 3 there and {told} here"):
            await tuned(tmp_path, every, name="other", replay=str(first))


async def test_a_page_that_does_not_publish_itself_is_judged_by_its_newest_weights(tmp_path: Path) -> None:
    folder = await tuned(tmp_path, {"every": 3, "n": 2, "pause_training": True})
    found = lines(folder / "evaluations.jsonl")
    assert [line["eval/version_oldest"] for line in found] == [line["step"] for line in found] == [0, 3, 6, 9]
    assert found[0]["eval/greedy"] == 0
    assert found[-1]["eval/greedy"] == 1


async def test_episodes_are_judged_by_their_own_rewards(tmp_path: Path) -> None:
    roles = {"policy": FAKE, "sampler": FAKE, "environment": {"source": "retry", "turns": 3}}
    sizes = {"prompts": 4, "steps": 8, "sampling": {"n": 2}, "evaluation": {"every": 4, "n": 2}}
    async with Run(RunConfig(folder=str(tmp_path))) as run:
        await play("multiturn", run, {"task": {"source": "none"}, **roles, **sizes}, TASK)
    found = lines(tmp_path / "run" / "evaluations.jsonl")
    assert [line["step"] for line in found] == [0, 4, 8]
    assert found[-1]["eval/reward"] == 1


def test_a_greedy_run_is_sampled_all_the_same() -> None:
    _, found, _ = updates(0.0, sampling={"n": 2, "temperature": 0.0}, evaluation={"every": 8, "n": 8})
    assert found[0]["eval/greedy"] == 0
    assert 0 < found[0]["eval/pass@1"] < 1


async def test_what_each_held_out_prompt_got_in_the_end_is_kept(tmp_path: Path) -> None:
    folder = await trained(tmp_path, "mine", fakes(), {}, steps=12)
    found = lines(folder / "held_out.jsonl")
    assert [line["prompt"] for line in found] == list(HELD_OUT)
    summary = json.loads((folder / "summary.json").read_bytes())
    for kind, name in (("greedy", "exact_match_after"), ("sampled", "exact_match_sampled_after")):
        assert sum(line[kind] for line in found) / len(found) == pytest.approx(summary[name])
    assert all(isinstance(line["completion"], str) for line in found)
