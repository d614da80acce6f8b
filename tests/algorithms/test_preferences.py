"""The scripts of preferences: on fake roles as they ship, and on the torch backend, where they learn."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from meshrl import MeshConfig, Run, RunConfig
from meshrl.config import validate
from meshrl.mesh import INLINE_BYTES
from meshrl.run.jobs import load_script

_ALGORITHMS = Path(__file__).parents[2] / "algorithms"
FAKE = {"backend": "fake", "model": "none"}

ON_FAKES: dict[str, Mapping[str, object]] = {
    "online_dpo": {"reward": {"backend": "fake"}, "prompts": 8, "steps": 10, "ahead": 1},
    "dpo": {"rows": 8, "steps": 10, "rejected": "{worse}"},
    "kto": {"rows": 8, "steps": 10, "label": "good"},
    "spin": {"rows": 8, "steps": 10, "iteration": 4},
}
"""Each page, and what it is given beside the roles."""

TOLD = {
    "online_dpo": {"reward", "margin", "accuracy", "chosen_log_ratio", "rejected_log_ratio"},
    "dpo": {"margin", "accuracy", "chosen_log_ratio", "rejected_log_ratio"},
    "kto": {"mismatched_kl"},
    "spin": {"margin", "accuracy"},
}


async def run_page(
    name: str, folder: Path, config: Mapping[str, object], inline_bytes: int = INLINE_BYTES
) -> tuple[Mapping[str, float], list[Mapping[str, float]]]:
    """The summary and the recorded steps of a run."""
    script = load_script(_ALGORITHMS / f"{name}.py")
    resolved = validate(script.schema, config, "test")
    meshes = {"main": MeshConfig(cpus=1)}
    async with Run(RunConfig(folder=str(folder), name=name, inline_bytes=inline_bytes, meshes=meshes)) as run:
        await script.function(run, resolved)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / name / "summary.json").read_bytes()), [json.loads(line) for line in lines]


def rows_file(folder: Path, rows: list[dict[str, object]], **chosen: object) -> dict[str, object]:
    """A task of these rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": str(path), **chosen}


@pytest.mark.parametrize("inline_bytes", [INLINE_BYTES, 0], ids=["by value", "by reference"])
@pytest.mark.parametrize("name", ON_FAKES)
async def test_a_page_runs_on_fakes(name: str, inline_bytes: int, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": f"{n}+1=", "answer": str(n + 1), "worse": str(n), "good": n % 3 > 0} for n in range(200)
    ]
    task = rows_file(tmp_path, rows, held_out=16, held_out_fraction=0.2)
    config = {"task": task, "policy": FAKE, "sampler": FAKE, "reference": FAKE, **ON_FAKES[name]}
    summary, steps = await run_page(name, tmp_path, config, inline_bytes)
    assert (summary["exact_match_before"], summary["exact_match_after"]) == (0.0, 1.0)
    assert len(steps) == 10
    assert TOLD[name] <= set(steps[0])


MODEL = {"characters": "ab>", "hidden_size": 16, "ffn_size": 32, "layers": 1, "heads": 2, "max_tokens": 16}
ROLES = {"policy": {"model": MODEL, "optimizer": {"lr": 1e-2}}, "sampler": {"model": MODEL}}

ON_TORCH: dict[str, Mapping[str, object]] = {
    "online_dpo": {"reward": {"function": "COUNT"}, "prompts": 12, "steps": 12, "sampling": {"n": 4, "max_tokens": 4}},
    "dpo": {"rows": 24, "steps": 10, "rejected": "{worse}", "sampling": {"max_tokens": 4}},
    "kto": {"rows": 24, "steps": 20, "label": "good", "sampling": {"max_tokens": 4}},
    "spin": {"rows": 24, "steps": 20, "iteration": 10, "sampling": {"max_tokens": 4}},
}

LEARNED: dict[str, Callable[[Mapping[str, float], list[Mapping[str, float]]], bool]] = {
    "online_dpo": lambda _, steps: steps[-1]["reward"] > steps[0]["reward"] + 1,
    "dpo": lambda after, _: after["held_out_accuracy"] == 1 and after["held_out_margin"] > 5,
    "kto": lambda _, steps: steps[-1]["utility"] > steps[0]["utility"] + 0.15,
    "spin": lambda _, steps: (
        steps[9]["chosen_log_ratio"] > 2 and steps[9]["accuracy"] == 1 and abs(steps[10]["chosen_log_ratio"]) < 1e-4
    ),
}
"""What a run on torch must show, from its summary and its steps; SPIN before and after its first change of opponent."""


@pytest.mark.parametrize("name", ON_TORCH)
async def test_a_page_learns_on_torch(name: str, tmp_path: Path) -> None:
    """Prompts of a and b, of which those that are good are answered by three times b."""
    (tmp_path / "count.py").write_text("def count(prompt, completion, row):\n    return completion.count('b')\n")
    words = [f"{number:06b}".replace("0", "a").replace("1", "b") for number in range(64)]
    good = [name != "kto" or number % 2 == 1 for number in range(64)]
    rows: list[dict[str, object]] = [
        {"question": f"{word}>", "answer": "bbb" if label else "aaa", "worse": "aab", "good": label}
        for word, label in zip(words, good, strict=True)
    ]
    task = rows_file(tmp_path, rows, held_out=8, held_out_fraction=0.3)
    given = json.loads(json.dumps(ON_TORCH[name]).replace("COUNT", f"{tmp_path}/count.py:count"))
    summary, steps = await run_page(name, tmp_path, {"task": task, **ROLES, **given})
    assert all(step.get("drift", 0) < 1e-5 for step in steps)
    assert LEARNED[name](summary, steps), (summary, steps[0], steps[-1])
