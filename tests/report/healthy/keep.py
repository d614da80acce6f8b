"""Copies of a run what `meshrl diagnose` reads: python tests/report/healthy/keep.py RUN FOLDER."""

import json
import sys
from pathlib import Path

READ = (
    *("step", "loss", "grad_norm", "reward", "reward_errors", "rows", "zero_std_groups", "entropy", "clip_fraction"),
    *("sampler_difference", "effective_sample_size", "staleness", "completion_tokens", "truncated"),
    *("eval/greedy", "eval/reward", "eval/prompts"),
)
SUMMARY = ("status", "steps", "exact_match_after")


def short(value: float | None) -> float | None:
    """To four digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def keep(run: Path, folder: Path) -> None:
    """Write the numbers that are read into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        if (run / name).is_file():
            lines = [json.loads(line) for line in (run / name).read_text("utf-8").splitlines()]
            kept = [{key: short(line[key]) for key in READ if key in line} for line in lines]
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
    summary = json.loads((run / "summary.json").read_bytes())
    text = json.dumps({key: short(summary[key]) for key in SUMMARY if key in summary})
    (folder / "summary.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
