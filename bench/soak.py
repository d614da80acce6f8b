"""A run of many steps, to see whether its memory grows and whether it survives faults.

    sudo python bench/soak.py --json F [--minutes M] [--hosts N] [--seed N]
    python bench/soak.py --hosts 1 --json F [--minutes M] [--engine ray|local]

On several hosts (3) made of namespaces (docs/hosts.md), bench/faults.py breaks the run repeatedly. See there.

On one machine: compares each process of an overlapped run at its end with itself after its first minute.

The run has a policy and a sampler of a tiny model, a reward, `ahead` = 2, and weights published each step through
shared memory. It takes as many steps as fit into M minutes (5). The private memory of a process (USS) counts, as the
median of the last ten seconds. Afterwards nothing of the run must be left in /dev/shm.
"""

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from bench.faults import soak_with_faults
from bench.harness import Figure, arguments, at_most, figure, report
from meshrl import (
    Batch,
    ClippedLoss,
    NewModel,
    Policy,
    PolicyConfig,
    Reward,
    RewardConfig,
    Run,
    RunConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    Task,
    group_advantages,
    publish,
    rollouts,
)
from meshrl.mesh.shared_memory import FOLDER
from meshrl.run.config import MeshConfig
from tests.support.cluster import missing

MODEL: Final = NewModel(characters="0123456789+= ", hidden_size=128, ffn_size=512, layers=4, heads=4, max_tokens=32)
TASK: Final = Task(
    train=Batch.of(prompt=[f"{n}+1=" for n in range(64)], answer=[str(n + 1) for n in range(64)], row=[{}] * 64),
    held_out=Batch.of(prompt=[]),
)
GROWTH: Final = 1.02
"""Allowed ratio of a process's memory at the end."""


class Watch:
    """Samples the private memory of this process and its child processes each second."""

    def __init__(self) -> None:
        self.seen: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=10))

    async def look(self) -> None:
        """Sample until this is cancelled."""
        while True:
            own = psutil.Process()
            for process in (own, *own.children(recursive=True)):
                try:
                    is_rank = process.cmdline()[:1] and process.cmdline()[0].startswith("ray::RankProcess")
                    if process == own or is_rank:
                        name = f"{'rank' if is_rank else 'controller'}, process {process.pid}"
                        self.seen[name].append(process.memory_full_info().uss / 2**20)
                except psutil.Error:
                    continue
            await asyncio.sleep(1)

    def now(self) -> dict[str, float]:
        """MiB by process."""
        return {name: statistics.median(values) for name, values in self.seen.items()}


async def soak(folder: str, engine: str, minutes: float) -> list[Figure]:
    """Train for `minutes`."""
    meshes = {"main": MeshConfig(cpus=1), "rollout": MeshConfig(cpus=1)}
    config = RunConfig(name="soak", folder=folder, engine=engine, meshes=meshes)
    table = {"model": MODEL.model_dump(), "backend": "torch"}
    watch, first, done = Watch(), dict[str, float](), 0
    async with Run(config) as run:
        policy = await run.spawn(Policy, PolicyConfig.model_validate(table))
        sampler = await run.spawn(Sampler, SamplerConfig.model_validate({**table, "mesh": "rollout", "slots": 16}))
        reward = await run.spawn(Reward, RewardConfig())
        await publish(policy, sampler)
        looking, began = asyncio.create_task(watch.look()), time.monotonic()
        sampling = Sampling(n=4, max_tokens=8)
        async with rollouts(sampler, TASK.batches(4, 0), sampling, ahead=2, score=reward.score) as stream:
            async for step in run.steps(1_000_000):
                batch = await anext(stream)
                advantages = group_advantages(np.asarray((await batch.load("rewards")).rewards), batch.groups)
                await run.record(await policy.update(batch.assign(advantages=advantages), ClippedLoss()), batch)
                await publish(policy, stream)
                if not first and time.monotonic() - began > 60:
                    first = watch.now()
                done = step + 1
                if time.monotonic() - began > 60 * minutes:
                    break
        looking.cancel()
    last = watch.now()
    return [
        figure("steps", done, "steps"),
        *(
            at_most(f"{name}: MiB, and by the first minute's", last[name], "MiB", GROWTH * was, was)
            for name, was in first.items()
        ),
    ]


def main() -> None:
    """Soak, then check what is left."""
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--engine", choices=("ray", "local"), default="ray", help="of the run on one host")
    parser.add_argument("--hosts", type=int, default=3, help="three or more: with faults, as root (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    given = parser.parse_args()
    if given.hosts > 1:
        if reason := missing():
            print(f"not measured: {reason}. --hosts 1 measures the memory of a run without faults, and needs no root")
            return
        figures = soak_with_faults(given.hosts, given.minutes, given.seed)
        report(f"soak on {given.hosts} hosts", figures, given.json)
        return
    before = set(FOLDER.glob("meshrl-*"))
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(soak(folder, given.engine, given.minutes))
        events = sum(path.stat().st_size for path in Path(folder).rglob("events*.jsonl")) / 2**20
    left = set(FOLDER.glob("meshrl-*")) - before
    figures += [figure("events", events, "MiB"), at_most("segments left in shared memory", len(left), "files", 0)]
    report("soak", figures, given.json)


if __name__ == "__main__":
    main()
