"""Each page of the policy gradients, as it ships: on fake roles, and on a small model that learns one letter."""

import json
from pathlib import Path

import pytest

from meshrl import MeshConfig, Run, RunConfig
from meshrl.config import validate
from meshrl.errors import ConfigError
from meshrl.mesh import INLINE_BYTES
from meshrl.run.jobs import load_script

ALGORITHMS = Path(__file__).parents[2] / "algorithms"
FAKE = {"backend": "fake", "model": "none"}
CHARACTERS = "abcd>"
MODEL = {"characters": CHARACTERS, "hidden_size": 16, "ffn_size": 32, "layers": 1, "heads": 2, "max_tokens": 16}
REWARD = """
def letters(prompt, completion, row):
    return completion.count("b") / 4
"""

GROUP: dict[str, object] = {"sampling": {"n": 4, "max_tokens": 4}, "prompts": 16}
SINGLE: dict[str, object] = {"sampling": {"max_tokens": 4}, "prompts": 64}
PAGES: dict[str, dict[str, object]] = {
    "rloo": GROUP,
    "reinforce": SINGLE,
    "dr_grpo": {**GROUP, "loss": {"constant": 4}},
    "gspo": GROUP,
    "cispo": GROUP,
    # On fakes each update makes the policy better: 16 a step soon solve the task, and then no prompt is left whose
    # completions are not all right, which dynamic sampling ends with an error.
    "dapo": {**GROUP, "minibatches": 1},
    "reinforce_pp": {**SINGLE, "kl": 1e-3},
    "reinforce_pp_baseline": GROUP,
    "remax": {**SINGLE, "prompts": 32},
    "opo": GROUP,
    "gpg": GROUP,
}
"""What each page is run with here: 64 completions a step."""

CLIPPED = ("grpo", "dr_grpo", "gspo", "cispo", "dapo", "reinforce_pp", "reinforce_pp_baseline", "ppo")
"""The pages that may make several updates of a batch, of which all but the first meet the clip."""

TAUGHT = {**PAGES, "grpo": GROUP, "ppo": {**SINGLE, "critic": {"optimizer": {"lr": 0.02}}}}
TAUGHT.update({name: {**TAUGHT[name], "minibatches": 2} for name in CLIPPED})
TAUGHT.update({name: {**TAUGHT[name], "kl": 1e-3} for name in ("rloo", "remax")})
TAUGHT["cispo"]["loss"] = {"clip_high": 0.2}
# Slower than the others: dynamic sampling ends with an error where every prompt is solved.
TAUGHT["dapo"]["policy"] = {"model": MODEL, "optimizer": {"lr": 0.01}}
"""On a model all of them, with those that have tests of their own on fakes."""

COMPARES_A_GROUP = [name for name, table in PAGES.items() if table["sampling"] == GROUP["sampling"]]


async def run_page(
    name: str, folder: Path, table: dict[str, object], inline_bytes: int = INLINE_BYTES
) -> tuple[list[dict[str, float]], dict[str, object]]:
    """The recorded steps of a run, and its summary."""
    script = load_script(ALGORITHMS / f"{name}.py")
    config = validate(script.schema, table, "test")
    meshes = {"main": MeshConfig(cpus=1)}
    async with Run(RunConfig(folder=str(folder), name=name, inline_bytes=inline_bytes, meshes=meshes)) as run:
        await script.function(run, config)
    lines = (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines], json.loads((folder / name / "summary.json").read_bytes())


@pytest.mark.parametrize(("ahead", "inline_bytes"), [(0, INLINE_BYTES), (2, 0)], ids=["by value", "by reference"])
@pytest.mark.parametrize("name", PAGES)
async def test_a_page_runs_as_it_ships_and_learns(tmp_path: Path, name: str, ahead: int, inline_bytes: int) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(200)))
    roles = {"policy": FAKE, "sampler": FAKE, "reference": FAKE, "reward": {"backend": "fake"}}
    task = {"source": str(rows), "held_out": 16, "held_out_fraction": 0.2}
    sampling = {"n": 4 if name in COMPARES_A_GROUP else 1, "max_tokens": 8}
    prompts = 8 if name in COMPARES_A_GROUP else 32
    table = {**PAGES[name], **roles, "task": task, "sampling": sampling, "prompts": prompts, "steps": 6, "ahead": ahead}
    if name == "dapo":
        table["overlong_buffer"] = 2
    steps, summary = await run_page(name, tmp_path, table, inline_bytes)
    assert (summary["exact_match_before"], summary["exact_match_after"]) == (0.0, 1.0)
    assert len(steps) == 6
    assert {"loss", "rows", "reward", "truncated", "reward_errors"} <= set(steps[0])


@pytest.mark.parametrize("name", TAUGHT)
async def test_a_page_teaches_a_model(tmp_path: Path, name: str) -> None:
    rows = [{"question": f"{one}{other}>", "answer": "b"} for one in "abcd" for other in "abcd"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "letters.py").write_text(REWARD, "utf-8")
    table: dict[str, object] = {
        "task": {"source": str(tmp_path / "rows.jsonl"), "held_out": 0},
        "policy": {"model": MODEL, "optimizer": {"lr": 0.02}},
        "reward": {"function": f"{tmp_path / 'letters.py'}:letters"},
        "steps": 12,
        **TAUGHT[name],
    }
    steps, _ = await run_page(name, tmp_path, table)
    assert [step["reward_errors"] for step in steps] == [0] * 12
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.3
    if name in CLIPPED:
        assert max(step["clip_fraction"] for step in steps) > 0


@pytest.mark.parametrize("name", COMPARES_A_GROUP)
def test_one_completion_a_prompt_is_no_group(name: str) -> None:
    table = {"task": {"source": "none"}, "policy": FAKE, "reward": {"backend": "fake"}}
    with pytest.raises(ConfigError, match=r"sampling.n = 1: must be greater than or equal to 2"):
        validate(load_script(ALGORITHMS / f"{name}.py").schema, {**table, **PAGES[name], "sampling": {"n": 1}}, "test")
