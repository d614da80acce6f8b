"""Pages on the torch backend teach a small model: one page of each family, others in `wide`; quickstarts, cut short."""

import json
import math
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, LlamaConfig

from tests.algorithms.pages import Ran, lines, meshrl, run_page, write_task

CHARACTERS = "abcd>"
MODEL = {"characters": CHARACTERS, "hidden_size": 16, "ffn_size": 32, "layers": 1, "heads": 2, "max_tokens": 16}
POLICY = {"model": MODEL, "optimizer": {"lr": 0.02}}


def write(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text, "utf-8")
    return f"{folder / name}.py:{name}"


def letter_b(folder: Path, characters: str = "abcd") -> dict[str, Any]:
    rows = [{"question": f"{one}{other}>", "answer": "bbbb"} for one, other in product(characters, repeat=2)]
    text = 'def letters(prompt, completion, row):\n    return completion.count("b") / 4\n'
    reward = {"function": write(folder, "letters", text)}
    return {"task": write_task(folder, rows, held_out=0), "policy": POLICY, "reward": reward}


GROUP: dict[str, Any] = {"sampling": {"n": 4, "max_tokens": 4}, "prompts": 16}
SINGLE: dict[str, Any] = {"sampling": {"max_tokens": 4}, "prompts": 64}
TWICE = {"minibatches": 2}
KL = {"kl": 1e-3}
TAUGHT: dict[str, dict[str, Any]] = {
    "reinforce_pp": SINGLE | TWICE | KL,  # all columns there are: a value for each token, and log-probs of two models
    "ppo": SINGLE | TWICE | {"critic": {"optimizer": {"lr": 0.02}}},
    **dict.fromkeys(("grpo", "gspo", "reinforce_pp_baseline"), GROUP | TWICE),
    **dict.fromkeys(("opo", "gpg", "streamed_grpo"), GROUP),
    "rloo": GROUP | KL,
    "reinforce": SINGLE,
    "dr_grpo": GROUP | TWICE | {"loss": {"constant": 4}},
    "cispo": GROUP | TWICE | {"loss": {"clip_high": 0.2}},
    # Slower than the others: dynamic sampling ends with an error where every prompt is solved.
    "dapo": GROUP | TWICE | {"policy": {"model": MODEL, "optimizer": {"lr": 0.01}}},
    "remax": SINGLE | KL | {"prompts": 32},
}
"""What each page is run with here: 64 completions a step. Those of two updates a step meet the clip."""


@pytest.mark.parametrize(
    "name", [*list(TAUGHT)[:2], *(pytest.param(name, marks=pytest.mark.wide) for name in list(TAUGHT)[2:])]
)
async def test_a_policy_gradient_teaches_a_model(tmp_path: Path, name: str) -> None:
    _, _, steps = await run_page(name, tmp_path, {**letter_b(tmp_path), "steps": 12, **TAUGHT[name]})
    assert [step["reward_errors"] for step in steps] == [0] * 12
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.3
    if "minibatches" in TAUGHT[name]:
        assert max(step["clip_fraction"] for step in steps) > 0


async def test_a_model_judges_completions(tmp_path: Path, random_model: Callable[..., str]) -> None:
    shape: dict[str, Any] = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "max_position_embeddings": 48, "num_labels": 1}
    judge = random_model(LlamaConfig(**shape), tmp_path / "judge", AutoModelForSequenceClassification)
    table = {**letter_b(tmp_path), **GROUP, "reward": {"model": judge}, "steps": 1}
    _, _, (step,) = await run_page("grpo", tmp_path, table)
    assert step["reward_errors"] == 0
    assert step["reward"] != 0
    assert step["grad_norm"] > 0


async def test_expert_iteration_then_distill_learn(tmp_path: Path) -> None:
    given = letter_b(tmp_path, "acd")
    four = {"max_tokens": 4, "ignore_eos": True}
    expert = {"min_reward": 0.5, "prompts": 8, "sampling": {"n": 8, **four}, "steps": 15}
    _, _, steps = await run_page("expert_iteration", tmp_path, {**given, **expert})
    assert steps[0]["reward"] < 0.35
    assert steps[-1]["reward"] > 0.8
    assert steps[0]["kept"] < steps[-1]["kept"]

    teacher = {"model": str(tmp_path / "expert_iteration" / "model")}
    policy = {**POLICY, "model": {**MODEL, "hidden_size": 24, "ffn_size": 48}}
    del given["reward"]
    table = {**given, "policy": policy, "teacher": teacher, "prompts": 64, "sampling": four, "steps": 25}
    folder, _, steps = await run_page("distill", tmp_path, table)
    assert steps[-1]["teacher_kl"] < steps[0]["teacher_kl"] / 4
    samples = lines(folder / "samples.jsonl")
    written = {step: "".join(row["completion"] for row in samples if row["step"] == step) for step in (0, 20)}
    assert written[0].count("b") < 0.6 * len(written[0])
    assert written[20].count("b") > 0.8 * len(written[20])


# Words of a and b, of which those that are good are answered by b alone.
WORDS = [f"{number:06b}".replace("0", "a").replace("1", "b") for number in range(64)]
OF_AB: dict[str, Any] = {"model": {**MODEL, "characters": "ab>"}, "optimizer": {"lr": 1e-2}}
OF_ROWS: dict[str, Any] = {"policy": OF_AB, "sampler": {"model": OF_AB["model"]}, "sampling": {"max_tokens": 4}}
OF_ROWS["rows"] = 24
Learned = Callable[[Mapping[str, Any], Any], bool]
PREFERENCES: dict[str, tuple[dict[str, Any], Learned]] = {
    "dpo": (
        {**OF_ROWS, "steps": 10, "rejected": "{worse}"},
        lambda after, _: after["held_out_accuracy"] == 1 and after["held_out_margin"] > 5,
    ),
    "kto": (
        {**OF_ROWS, "steps": 20, "label": "good"},
        lambda _, steps: steps[-1]["utility"] > steps[0]["utility"] + 0.15,
    ),
    "spin": (  # before and after its first change of opponent
        {**OF_ROWS, "steps": 20, "iteration": 10},
        lambda _, steps: (
            steps[9]["chosen_log_ratio"] > 2 and steps[9]["accuracy"] == 1 and abs(steps[10]["chosen_log_ratio"]) < 1e-4
        ),
    ),
    "online_dpo": (
        {"policy": OF_AB, "sampling": {"n": 4, "max_tokens": 4}, "prompts": 12, "steps": 12},
        lambda _, steps: steps[-1]["reward"] > steps[0]["reward"] + 1,
    ),
}
"""What each page is given, and what a run must show, from its summary and its steps."""


def preferring(name: str, folder: Path) -> dict[str, Any]:
    good = [name != "kto" or number % 2 == 1 for number in range(64)]
    rows = [
        {"question": f"{word}>", "answer": "bbb" if label else "aaa", "worse": "aab", "good": label}
        for word, label in zip(WORDS, good, strict=True)
    ]
    table = {**PREFERENCES[name][0], "task": write_task(folder, rows, held_out=8, held_out_fraction=0.3)}
    if name == "online_dpo":
        counts = "def count(prompt, completion, row):\n    return completion.count('b')\n"
        table["reward"] = {"function": write(folder, "count", counts)}
    return table


@pytest.mark.parametrize(
    "name", ["dpo", *(pytest.param(name, marks=pytest.mark.wide) for name in PREFERENCES if name != "dpo")]
)
async def test_preferences_are_learned(name: str, tmp_path: Path) -> None:
    _, learned = PREFERENCES[name]
    _, summary, steps = await run_page(name, tmp_path, preferring(name, tmp_path))
    assert all(step.get("drift", 0) < 1e-5 for step in steps)
    assert learned(summary, steps), (summary, steps[0], steps[-1])


def judging(name: str, folder: Path) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {"question": f"{word}>", "answer": "bbb", "worse": "bab", "by": 0.5, "completions": list(word[:3])}
        | {"labels": ["a" not in word[: at + 1] for at in range(3)]}
        for word in WORDS
    ]
    pairs = {"rejected": "{worse}", "margin": "by"} if name == "reward_model" else {}
    task = write_task(folder, rows, held_out=8, held_out_fraction=0.3)
    return {"task": task, "reward": OF_AB, "rows": 24, **pairs}


@pytest.mark.parametrize("name", ["reward_model", pytest.param("process_reward", marks=pytest.mark.wide)])
async def test_a_reward_model_learns_and_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    async def ran(steps: int, *, resume: bool = False) -> Ran:
        table = {**judging(name, tmp_path), "steps": steps}
        return await run_page(name, tmp_path, table, checkpoint_every=5, resume=resume)

    folder, summary, steps = await ran(25)
    assert all(step.get("drift", 0) < 1e-5 for step in steps)
    assert summary["held_out_accuracy_after"] > 0.8
    assert steps[-1]["loss"] < steps[0]["loss"] / 2
    assert (folder / "model" / "config.json").exists()
    _, again, later = await ran(30, resume=True)
    assert again["held_out_accuracy_before"] == summary["held_out_accuracy_before"]
    assert [step["loss"] for step in later[:25]] == [step["loss"] for step in steps]
    assert len(later) == 30


GAME = """
class game:
    def reset(self, row):
        return ">"
    def step(self, completion):
        return "d", float(completion == "b"), completion == "b"
"""


@pytest.mark.parametrize(
    "name", [*list(TAUGHT)[2:], "multiturn", *(name for name in PREFERENCES if name != "dpo"), "process_reward"]
)
async def test_a_page_makes_a_step_of_a_model(name: str, tmp_path: Path) -> None:
    if name in TAUGHT:
        table = {**letter_b(tmp_path), **TAUGHT[name]}
    elif name == "multiturn":
        task = {**letter_b(tmp_path)["task"], "held_out": 2, "held_out_fraction": 0.5}
        game = {"source": write(tmp_path, "game", GAME), "turns": 2}
        sizes = {"prompts": 8, "sampling": {"n": 8, "max_tokens": 1}}
        table = {"task": task, "policy": POLICY, "environment": game, **sizes}
    else:
        table = (preferring if name in PREFERENCES else judging)(name, tmp_path)
    _, _, (step,) = await run_page(name, tmp_path, {**table, "steps": 1})
    assert math.isfinite(step["loss"])
    assert step["grad_norm"] >= 0


SHORT = ("task.held_out=32", "task.options.size=2000")
ONE_RANK = "run.meshes.main={ranks=1,cpus=1}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(config: str, *overrides: str) -> None:
    assert meshrl("run", config, *SHORT, *overrides) == 0


def metrics(name: str) -> list[dict[str, float]]:
    return lines(Path("runs", name, "metrics.jsonl"))


@pytest.mark.bits
@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.wide)])
def test_the_quickstart_learns_and_a_seed_decides_every_bit(engine: str, request: pytest.FixtureRequest) -> None:
    if engine == "ray":
        request.getfixturevalue("ray_cluster")
    run("sft/quickstart", ONE_RANK, "steps=8", "policy.optimizer.warmup_steps=2")
    sft = metrics("quickstart-sft")
    assert sft[-1]["loss"] < sft[0]["loss"] - 0.2

    for name, where in {"one": "local", "other": engine}.items():
        run("grpo/quickstart", ONE_RANK, "steps=3", "prompts=4", f"run.name={name}", f"run.engine={where}")
    assert metrics("one") == metrics("other")
    weights = [Path("runs", name, "model", "model.safetensors").read_bytes() for name in ("one", "other")]
    assert weights[0] == weights[1]

    summary = json.loads(Path("runs/one/summary.json").read_bytes())
    assert summary["status"] == "finished"
    assert {"exact_match_before", "exact_match_after", "wall_s", "tokens", "first_reward"} <= set(summary)
    assert {"step", "prompt", "completion", "reward", "answer"} <= set(lines(Path("runs/one/samples.jsonl"))[0])

    run("ppo/quickstart", ONE_RANK, "steps=3", "prompts=8", "ahead=1")
    steps = metrics("quickstart-ppo")
    assert len(steps) == 3
    assert {"sampler_kl", "clip_fraction", "critic_value_clip_fraction", "critic_explained_variance"} <= set(steps[0])


def test_the_quickstart_of_an_agent_goes_on_from_a_model_with_a_chat_template() -> None:
    small = (ONE_RANK, "task.held_out=4", "steps=2")
    run("sft/agent", *small, "rows=4", "policy.optimizer.warmup_steps=1", "sampling.max_tokens=8")
    template = Path("runs/quickstart-agent-sft/model/chat_template.jinja")
    assert "tool_calls" in template.read_text("utf-8")

    run("agent/quickstart", *small, "prompts=2", "sampling={n=2,max_tokens=8}")
    folder = Path("runs/quickstart-agent")
    summary = json.loads((folder / "summary.json").read_bytes())
    assert {"reward_before", "reward_after", "reward_sampled_before"} <= set(summary)
    steps = metrics("quickstart-agent")
    assert [step["rows"] for step in steps] == [4, 4]
    assert all(step["tokens"] > 4 and step["turns"] >= 1 for step in steps)
    assert {"prompt", "completion", "reward", "answer"} <= set(lines(folder / "samples.jsonl")[0])


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.wide
def test_three_layouts_of_megatron_train_in_the_same_processes() -> None:
    makes_a_model = ("run.engine=local", "run.meshes.main.ranks=1", "policy.backend=torch", "policy.axes={dp=1}")
    run("sft/quickstart-megatron", "rows=16", "steps=8", "policy.optimizer.warmup_steps=2", *makes_a_model)
    run("ppo/quickstart-megatron", "prompts=8", "steps=5")
    assert all(Path("runs/quickstart-megatron", saved, "model.safetensors").exists() for saved in ("model", "critic"))
    steps = metrics("quickstart-megatron")
    assert len(steps) == 5
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert max(step["sampler_difference"] for step in steps) < 1e-5
    assert {"reward", "kl", "critic_loss", "critic_explained_variance"} <= set(steps[0])
