"""Draw docs/agents.svg from runs of agent/quickstart: `python docs/agents.py runs/one runs/two ...`, and print a table.

Needs matplotlib, which reasoning_gym brings along.
"""

import json
import sys
import tomllib
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

SMOOTH = 5
STYLES = {0: "-", 2: "--"}


def main(folders: list[str]) -> None:
    """Success a step, smoothed, and of sampled answers on held-out words before and after."""
    mpl.rcParams["svg.hashsalt"] = "meshrl"
    figure, axes = plt.subplots(figsize=(7, 3.2), constrained_layout=True)
    table = ["| `ahead` | seed | sampled before | after | greedy before | after | seconds |", f"|{'---|' * 7}"]
    for folder in map(Path, folders):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
        ahead, seed = config["ahead"], config["run"]["seed"]
        reward = np.convolve([line["reward"] for line in lines], np.ones(SMOOTH) / SMOOTH, "valid")
        style = {"color": f"C{seed}", "ls": STYLES[ahead], "label": f"ahead={ahead}, seed {seed}"}
        axes.plot(np.arange(len(reward)) + SMOOTH, reward, lw=1.2, **style)
        sampled, greedy = (
            [summary[f"reward_{kind}{when}"] for when in ("before", "after")] for kind in ("sampled_", "")
        )
        axes.plot([0, len(lines)], sampled, "o", color=f"C{seed}", ms=5, fillstyle="none" if ahead else "full")
        numbers = " | ".join(f"{number:.3f}" for number in (*sampled, *greedy))
        table.append(f"| {ahead} | {seed} | {numbers} | {summary['wall_s']:.0f} |")
    axes.set(xlabel="step", ylabel="success; dots: held out", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    figure.savefig(Path(__file__).with_name("agents.svg"), metadata={"Date": None})
    sys.stdout.write("\n".join(table) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
