from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from meshrl import Batch, Metrics, PolicyConfig, Task
from meshrl.config import validate
from meshrl.data import Weights
from meshrl.errors import ConfigError
from meshrl.observe.metric_info import metric_info
from meshrl.run.recorder import statistics
from meshrl.testing import FakePolicy, FakeRun, ScriptedSampler, delayed, simulate
from tests.algorithms.pages import FAKE, NAMES, Ran, lines, numbers, play, run_page, script, write_task

ROLES: dict[str, object] = {
    **dict.fromkeys(("policy", "sampler", "reference", "critic"), FAKE),
    "reward": {"backend": "fake"},
    "teacher": {"backend": "fake", "model": "teacher"},
}
ROWS = [
    {"question": f"{n}+1=", "answer": f"{n + 1}.", "worse": f"{n}.", "by": n % 3 / 2, "good": n % 3 > 0}
    | {"completions": [f"{n + n % 2}", "."], "labels": [n % 2 == 1] * 2}
    for n in range(200)
]
REWARDED = {"reward", "truncated", "reward_errors"}
PAIRS = {"margin", "accuracy"}


@dataclass(frozen=True)
class Page:
    """What a page is given beside the roles, what its steps tell, and what it is given more where columns stay."""

    table: dict[str, Any]
    told: set[str] = field(default_factory=set)
    by_reference: dict[str, Any] = field(default_factory=dict)


def group(told: set[str] = REWARDED, by_reference: dict[str, Any] | None = None, **table: Any) -> Page:
    given = {"prompts": 8, "sampling": {"n": 4, "max_tokens": 8}, "steps": 6, **table}
    return Page(given, told, by_reference or {})


def single(by_reference: dict[str, Any] | None = None, **table: Any) -> Page:
    return group(prompts=32, sampling={"max_tokens": 8}, by_reference=by_reference, **table)


KL: dict[str, Any] = {"kl": 0.1}
PAGES = {
    **dict.fromkeys(("gspo", "cispo", "reinforce_pp_baseline", "opo", "gpg"), group()),
    "grpo": group(steps=12, by_reference={"loss": {"kl": 0.1}}),
    "streamed_grpo": group(steps=12, by_reference={"loss": {"kl": 0.1, "anchor": "trainer"}, "parts": 3}),
    "rloo": group(by_reference=KL),
    "reinforce": single(),
    "dr_grpo": group(loss={"constant": 4}),
    # Each update makes a fake better: 16 a step soon solve the task, and then no prompt is left whose completions are
    # not all right, which dynamic sampling ends with an error.
    "dapo": group(minibatches=1, overlong_buffer=2),
    "reinforce_pp": single(kl=1e-3),
    "remax": single(by_reference=KL),
    "ppo": single(epochs=2, minibatches=2, by_reference={"gae": {"kl": 0.1}, "whiten": False}),
    "multiturn": group(steps=12, environment={"source": "retry", "turns": 3}, sampling={"n": 4}),
    "expert_iteration": group(steps=12, sampling={"n": 8}),
    "distill": group({"rows"}, steps=12, sampling={}),
    "sft": Page({"rows": 8, "steps": 10}),
    "online_dpo": group(REWARDED | PAIRS | {"chosen_log_ratio", "rejected_log_ratio"}, steps=10),
    "dpo": Page({"rows": 8, "steps": 10, "rejected": "{worse}"}, PAIRS | {"chosen_log_ratio", "rejected_log_ratio"}),
    "kto": Page({"rows": 8, "steps": 10, "label": "good"}, {"mismatched_kl"}),
    "spin": Page({"rows": 8, "steps": 10, "iteration": 4}, PAIRS),
    "reward_model": Page({"rows": 8, "steps": 10, "rejected": "{worse}", "margin": "by"}, {"margin"}),
    "process_reward": Page({"rows": 8, "steps": 10}),
}
COMPARES_A_GROUP = (
    *("grpo", "streamed_grpo", "rloo", "dr_grpo", "gspo", "cispo", "dapo", "reinforce_pp_baseline", "opo", "gpg"),
    *("multiturn", "online_dpo"),
)


def test_every_page_is_here_but_that_of_agents() -> None:
    assert set(PAGES) == set(NAMES) - {"agent"}


@pytest.mark.parametrize("name", PAGES)
async def test_a_page_runs_as_it_ships_and_learns(tmp_path: Path, name: str) -> None:
    page, known = PAGES[name], script(name).schema.model_fields
    chosen: dict[str, Any] = {"task": write_task(tmp_path, ROWS, held_out=16, held_out_fraction=0.2)}
    chosen |= {role: given for role, given in ROLES.items() if role in known}
    if name in ("reward_model", "process_reward"):
        chosen["reward"] = FAKE
    if "sampler" in known:
        chosen["evaluation"] = {"every": 4, "n": 2}
    late = {"ahead": 2} if "ahead" in known else {}
    by_value = await run_page(name, tmp_path / "by value", {**chosen, **page.table})
    check(name, by_value, page)
    by_reference = {**chosen, **page.table, **page.by_reference, **late}
    check(name, await run_page(name, tmp_path / "by reference", by_reference, inline_bytes=0), page)


def check(name: str, ran: Ran, page: Page) -> None:
    summary, steps = ran.summary, ran.steps
    count = page.table["steps"]
    assert (summary["status"], summary["steps"], len(steps)) == ("finished", count, count)
    assert {"loss", "rows", *page.told} - set(steps[0]) == set()
    assert [number for number in steps[-1] if not metric_info(number).meaning] == [], "numbers that no page explains"
    if name in ("reward_model", "process_reward"):
        assert summary["held_out_accuracy_before"] < 1 == summary["held_out_accuracy_after"]
        assert not (ran.folder / "evaluations.jsonl").exists()
        if name == "reward_model":
            assert steps[0]["margin"] == 0
            assert steps[9]["margin"] == pytest.approx(1.8, rel=1e-5)
        return
    evaluated = lines(ran.folder / "evaluations.jsonl")
    assert [line["step"] for line in evaluated] == [*range(0, count + 1, 4)]
    if name == "multiturn":
        assert summary["reward_before"] < 0.3
        assert summary["turns_before"] > 2.5
        assert (summary["reward_after"], summary["turns_after"]) == (1.0, 1.0)
        assert steps[-1]["turns"] < steps[0]["turns"]
        assert evaluated[-1]["eval/reward"] == 1.0
    else:
        assert (summary["exact_match_before"], summary["exact_match_after"]) == (0.0, 1.0)
    if name in ("grpo", "ppo", "multiturn"):
        assert steps[-1]["reward"] > steps[0]["reward"] + 0.4
    if name == "ppo":
        assert set(steps[0]) >= {"critic_loss", "critic_value_error", "critic_explained_variance"}
        assert steps[0]["critic_value_error"] == pytest.approx(steps[0]["reward"], abs=0.3)


async def test_a_step_that_keeps_nothing_changes_nothing(tmp_path: Path) -> None:
    given = {"task": write_task(tmp_path, ROWS, held_out=0), "policy": FAKE, "sampler": FAKE, "reward": ROLES["reward"]}
    few = {"min_reward": 2.0, "prompts": 4, "sampling": {"n": 2, "max_tokens": 4}, "steps": 3, "ahead": 1}
    _, _, steps = await run_page("expert_iteration", tmp_path, {**given, **few})
    assert [step["kept"] for step in steps] == [0.0] * 3
    assert all("loss" not in step for step in steps)
    assert [step["staleness"] for step in steps] == [0.0] * 3


def test_one_completion_a_prompt_is_no_group() -> None:
    for name in COMPARES_A_GROUP:
        roles = {"task": {"source": "none"}, "policy": FAKE, "reward": {"backend": "fake"}}
        table = {**roles, **PAGES[name].table, "sampling": {"n": 1}}
        with pytest.raises(ConfigError, match=r"sampling.n = 1: must be greater than or equal to 2"):
            validate(script(name).schema, table, "test")


GIVEN = {"task": {"source": "none"}, "policy": FAKE, "sampler": FAKE, "prompts": 4}
SOLVE = """
async def solve(client, row):
    messages = [{"role": "user", "content": row["prompt"]}]
    told = await client.chat.completions.create(model="policy", messages=messages)
    return float(told.choices[0].message.content == row["answer"])
"""


class Learning(ScriptedSampler):
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
    async def record(self, metrics: Metrics, batch: Batch | None = None, **numbers: float) -> None:
        assert batch is not None
        await super().record(metrics, batch, **await statistics(batch, worked=bool(self.recorded)))


@pytest.mark.parametrize("asked", [0, 8])
def test_a_step_of_failed_programs_ends_no_run(asked: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert len(policy.updates) == 2
    told = capsys.readouterr().err
    assert f"nothing to learn from 8 episodes: 8 failed, and {asked} asked the model" in told
    assert "OSError: a tool is down" in told
