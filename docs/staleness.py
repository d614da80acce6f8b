"""Draw docs/staleness.svg: `python docs/staleness.py NAME:RUN,RUN,... NAME:RUN,...`, the seeds of each way.

Needs matplotlib, which reasoning_gym brings along.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray

SMOOTH = 10


def main(ways: list[str]) -> None:
    """Reward a step, smoothed: the mean of the seeds and their range."""
    mpl.rcParams["svg.hashsalt"] = "meshrl"
    figure, axes = plt.subplots(figsize=(7, 3.2), constrained_layout=True)
    for number, way in enumerate(ways):
        name, _, folders = way.partition(":")
        curves = np.stack([rewards(Path(folder)) for folder in folders.split(",")])
        steps = np.arange(curves.shape[1]) + SMOOTH
        axes.plot(steps, curves.mean(0), color=f"C{number}", lw=1.4, label=name)
        axes.fill_between(steps, curves.min(0), curves.max(0), color=f"C{number}", alpha=0.2, lw=0)
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(Path(__file__).with_name("staleness.svg"), metadata={"Date": None})


def rewards(folder: Path) -> NDArray[np.float64]:
    """A run's rewards, smoothed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return np.convolve([line["reward"] for line in lines], np.ones(SMOOTH) / SMOOTH, "valid")


if __name__ == "__main__":
    main(sys.argv[1:])
