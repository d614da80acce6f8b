"""Multi-turn GRPO: as it ships on fakes, and on the torch backend, where what was said before is read again."""

import json
from pathlib import Path

import pytest

from meshrl import Run, RunConfig
from meshrl.config import validate
from meshrl.mesh import INLINE_BYTES
from meshrl.user_code import import_file

FAKE = {"backend": "fake", "model": "none"}
BOTH_WAYS = pytest.mark.parametrize("inline_bytes", [INLINE_BYTES, 0], ids=["by value", "by reference"])

GAME = """
class Guess:
    '''Is it x or y? The number of guesses that it takes is what counts.'''
    def reset(self, row):
        self.secret = row["answer"]
        return "?"
    def step(self, completion):
        if completion == self.secret:
            return "", 1.0, True
        return "-", 0.0, False
"""


async def run_multiturn(folder: Path, rows: list[dict[str, str]], **config: object) -> dict[str, float]:
    """The summary of a run of the script as it ships."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    module = import_file(Path(__file__).parents[2] / "algorithms" / "multiturn.py")
    task = {"source": str(folder / "rows.jsonl"), "held_out": 16, "held_out_fraction": 0.2}
    inline = config.pop("inline_bytes", INLINE_BYTES)
    resolved = validate(vars(module)["MultiturnConfig"], {"task": task, **config}, "test")
    run = RunConfig.model_validate({"folder": str(folder), "name": "multiturn", "inline_bytes": inline})
    async with Run(run) as going:
        await vars(module)["multiturn"](going, resolved)
    summary: dict[str, float] = json.loads((folder / "multiturn" / "summary.json").read_bytes())
    return summary


@BOTH_WAYS
@pytest.mark.parametrize("ahead", [0, 2])
async def test_it_learns_on_fakes(tmp_path: Path, inline_bytes: int, ahead: int) -> None:
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(200)]
    environment = {"source": "retry", "turns": 3}
    fakes = {"policy": FAKE, "sampler": FAKE, "environment": environment, "inline_bytes": inline_bytes}
    summary = await run_multiturn(tmp_path, rows, **fakes, ahead=ahead, prompts=8, steps=12, sampling={"n": 4})
    assert summary["reward_before"] < 0.3
    assert summary["turns_before"] > 2.5
    assert (summary["reward_after"], summary["turns_after"]) == (1.0, 1.0)
    lines = [json.loads(line) for line in (tmp_path / "multiturn" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["reward"] > lines[0]["reward"] + 0.4
    assert lines[-1]["turns"] < lines[0]["turns"]


async def test_it_learns_a_game_on_torch(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME, "utf-8")
    rows = [{"question": f"{n}?", "answer": "ab"[n % 2]} for n in range(200)]
    model = {"characters": "abc?-", "hidden_size": 32, "ffn_size": 64, "layers": 1, "heads": 2, "max_tokens": 16}
    summary = await run_multiturn(
        tmp_path,
        rows,
        policy={"model": model, "optimizer": {"lr": 1e-2}},
        environment={"source": f"{tmp_path / 'game.py'}:Guess", "turns": 2},
        prompts=8,
        steps=30,
        sampling={"n": 8, "max_tokens": 1},
    )
    assert summary["reward_before"] < 0.5
    # Half of the secrets are found at the first guess; the others only by who does not say the same again.
    assert summary["reward_after"] > 0.8
