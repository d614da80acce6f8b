"""The shipped scripts run unchanged on fake roles, in well under a second."""

import json
from pathlib import Path

import pytest

from meshrl import Run, RunConfig
from meshrl.config import validate
from meshrl.mesh import INLINE_BYTES
from meshrl.report.quantities import quantity
from meshrl.user_code import import_file

BOTH_WAYS = pytest.mark.parametrize("inline_bytes", [INLINE_BYTES, 0], ids=["by value", "by reference"])
"""A script loads what it reads, so it runs the same where every column stays on its rank."""
_ALGORITHMS = Path(__file__).parents[2] / "algorithms"


def rows_file(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(200)))
    return path


async def run_script(name: str, folder: Path, inline_bytes: int = INLINE_BYTES, **config: object) -> dict[str, object]:
    module = import_file(_ALGORITHMS / f"{name}.py")
    schema = vars(module)[f"{name.title()}Config"]
    fake = {"backend": "fake", "model": "none"}
    task = {"source": str(rows_file(folder)), "held_out": 16, "held_out_fraction": 0.2}
    resolved = validate(schema, {"task": task, "policy": fake, "sampler": fake, **config}, "test")
    async with Run(RunConfig(folder=str(folder), name=name, inline_bytes=inline_bytes)) as run:
        await vars(module)[name](run, resolved)
    recorded = (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [number for number in json.loads(recorded[-1]) if not quantity(number).meaning] == []
    summary: dict[str, object] = json.loads((folder / name / "summary.json").read_bytes())
    return summary


@pytest.mark.parametrize("reward", ["fake", "function"])
async def test_grpo_learns(tmp_path: Path, reward: str) -> None:
    summary = await run_script("grpo", tmp_path, reward={"backend": reward}, prompts=8, steps=12, sampling={"n": 4})
    assert summary["status"] == "finished"
    assert summary["steps"] == 12
    assert summary["exact_match_before"] == 0.0
    assert summary["exact_match_after"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["reward"] > lines[0]["reward"] + 0.5
    assert {"loss", "rows", "completion_tokens", "truncated", "reward_errors", "step_s"} <= set(lines[0])


@BOTH_WAYS
async def test_grpo_with_a_reference(tmp_path: Path, inline_bytes: int) -> None:
    fake = {"backend": "fake", "model": "none"}
    summary = await run_script(
        "grpo", tmp_path, inline_bytes, reward={"backend": "fake"}, reference=fake, loss={"kl": 0.1}, prompts=4, steps=2
    )
    assert summary["status"] == "finished"


@BOTH_WAYS
async def test_sft_learns(tmp_path: Path, inline_bytes: int) -> None:
    summary = await run_script("sft", tmp_path, inline_bytes, rows=8, steps=10)
    assert (summary["exact_match_before"], summary["exact_match_after"]) == (0.0, 1.0)
