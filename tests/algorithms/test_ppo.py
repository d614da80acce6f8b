"""PPO on fake roles, its columns in what the fakes are given, and on the torch backend, cut short."""

import json
from pathlib import Path

import pytest

from meshrl import Run, RunConfig
from meshrl.cli import main
from meshrl.config import validate
from meshrl.mesh import INLINE_BYTES
from meshrl.user_code import import_file

FAKE = {"backend": "fake", "model": "none"}
BOTH_WAYS = pytest.mark.parametrize("inline_bytes", [INLINE_BYTES, 0], ids=["by value", "by reference"])


async def run_ppo(folder: Path, inline_bytes: int = INLINE_BYTES, **config: object) -> list[dict[str, float]]:
    """The recorded steps of a run on fakes."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(200)))
    module = import_file(Path(__file__).parents[2] / "algorithms" / "ppo.py")
    roles = {"policy": FAKE, "critic": FAKE, "sampler": FAKE, "reward": {"backend": "fake"}}
    task = {"source": str(rows), "held_out": 16, "held_out_fraction": 0.2}
    resolved = validate(vars(module)["PpoConfig"], {"task": task, **roles, **config}, "test")
    async with Run(RunConfig(folder=str(folder), name="ppo", inline_bytes=inline_bytes)) as run:
        await vars(module)["ppo"](run, resolved)
    assert json.loads((folder / "ppo" / "summary.json").read_bytes())["exact_match_after"] == 1.0
    return [json.loads(line) for line in (folder / "ppo" / "metrics.jsonl").read_text().splitlines()]


@BOTH_WAYS
@pytest.mark.parametrize("ahead", [0, 2])
async def test_ppo_learns(tmp_path: Path, inline_bytes: int, ahead: int) -> None:
    steps = await run_ppo(tmp_path, inline_bytes, prompts=16, steps=6, ahead=ahead, epochs=2, minibatches=2)
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.4
    assert {"loss", "rows", "critic_loss", "critic_value_error", "critic_explained_variance"} <= set(steps[0])
    assert steps[0]["critic_value_error"] == pytest.approx(steps[0]["reward"], abs=0.3)


async def test_the_reference_is_read_for_the_kl_in_the_reward(tmp_path: Path) -> None:
    steps = await run_ppo(tmp_path, reference=FAKE, gae={"kl": 0.1}, whiten=False, prompts=8, steps=8)
    assert len(steps) == 8


def test_the_quickstart_trains_on_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("task.held_out=16", "task.options.size=2000", "steps=3")
    for job in ("sft/quickstart", "rows=16"), ("ppo/quickstart", "prompts=8", "ahead=1"):
        with pytest.raises(SystemExit) as ended:
            main(["run", *job, *short])
        assert ended.value.code == 0
    lines = Path("runs/quickstart-ppo/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert {"sampler_kl", "clip_fraction", "critic_value_clip_fraction", "critic_explained_variance"} <= set(steps[0])
    assert len(steps) == 3
