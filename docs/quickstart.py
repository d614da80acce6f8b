"""Draw docs/quickstart.svg from runs of grpo/quickstart: `python docs/quickstart.py runs/one runs/two ...`.

Needs matplotlib, which reasoning_gym brings along.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

SMOOTH = 10


def main(folders: list[str]) -> None:
    """Reward a step, smoothed, and greedy exact match on held-out words before and after."""
    mpl.rcParams["svg.hashsalt"] = "meshrl"
    figure, axes = plt.subplots(figsize=(7, 3.2), constrained_layout=True)
    for number, folder in enumerate(map(Path, folders)):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        reward = np.convolve([line["reward"] for line in lines], np.ones(SMOOTH) / SMOOTH, "valid")
        axes.plot(np.arange(len(reward)) + SMOOTH, reward, color=f"C{number}", lw=1.2, label=f"seed {number}")
        ends = [summary["exact_match_before"], summary["exact_match_after"]]
        axes.plot([0, len(lines)], ends, "o", color=f"C{number}", ms=5)
    axes.set(xlabel="step", ylabel="reward; dots: greedy exact match, held out", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(Path(__file__).with_name("quickstart.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main(sys.argv[1:])
