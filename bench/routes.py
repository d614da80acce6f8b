"""Which way of weights from FSDP ranks to samplers on other hosts is faster: copies ("auto") or a broadcast.

    sudo python bench/routes.py --json F [--rate 1e9] [--rounds N]

Four hosts made of namespaces (docs/hosts.md), each with a node of Ray and a cable of so many bits a second. A policy of
two ranks is on the first host, or on the first two. Two samplers of torch are on each of the last two. The time of a
sync begins with `policy.weights()`, and ends when all samplers have proved every fingerprint and the probe. Beside it,
what the cables of the policy's hosts carried away. About three minutes; it needs root.
"""

import argparse
import asyncio
import json
import sys
import time
from subprocess import PIPE
from typing import Final, Literal

from bench.harness import Figure, arguments, figure, median, report
from meshrl import Mesh, NewModel, PolicyConfig, Resources, SamplerConfig
from meshrl.engines.ray import RayEngine
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from tests.support.cluster import Cluster, missing

HOSTS: Final = 2
"""With samplers."""
EACH: Final = 2
"""Samplers of a host."""
WARM: Final = 2
MIB: Final = 2**20
MODEL: Final = NewModel(characters="abcdefgh>", hidden_size=512, ffn_size=2048, layers=6, heads=2, max_tokens=48)
"""96 MiB in float32."""

Way = Literal["auto", "broadcast"]


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--rate", type=float, default=1e9, help="bits a second of each cable (default: 1e9)")
    parser.add_argument("--on", help=argparse.SUPPRESS)  # the address of the cluster on whose first host this runs
    parser.add_argument("--spread", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on:
        print(json.dumps(asyncio.run(timed_on(options.on, options.spread, options.way, options.rounds))))
        return
    if reason := missing():
        print(f"not measured: {reason}")
        return
    train = [{"train": 1.0}, {"train": 1.0}]
    with Cluster(2 + HOSTS, resources=train) as cluster:
        for host in cluster.hosts:
            host.slow(rate=options.rate)
        figures = [each for spread in (1, 2) for each in compared(cluster, spread, options.rounds)]
    report(f"{2 + HOSTS} hosts with cables of {options.rate / 1e6:.0f} Mbit/s", figures, options.json)


def compared(cluster: Cluster, spread: int, rounds: int) -> list[Figure]:
    """Both ways, of a policy on this number of hosts."""
    auto, broadcast = (asked(cluster, spread, way, rounds) for way in ("auto", "broadcast"))
    place = "one host" if spread == 1 else "two hosts"
    return [
        figure(f"policy on {place}: a broadcast, against auto", broadcast["sync"], "s", auto["sync"]),
        figure("  bytes that leave the policy's hosts", broadcast["sent"], "MiB", auto["sent"]),
    ]


def asked(cluster: Cluster, spread: int, way: str, rounds: int) -> dict[str, float]:
    """What a controller on the first host measures, and MiB of each sync that the policy's hosts sent."""
    told = ["--on", cluster.address, "--spread", str(spread), "--way", way, "--rounds", str(rounds)]
    before = sum(host.traffic()[0] for host in cluster.hosts[:2])
    process = cluster.hosts[0].start([sys.executable, __file__, *told], stdout=PIPE)
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the controller on the first host ended with status {process.returncode}")
    sent = sum(host.traffic()[0] for host in cluster.hosts[:2]) - before
    return {**json.loads(said.splitlines()[-1]), "sent": sent / MIB / (WARM + rounds)}


async def timed_on(address: str, spread: int, way: Way, rounds: int) -> dict[str, float]:
    """Seconds of a sync, with the controller here."""
    engine = RayEngine(address)
    try:
        place = Resources(cpus=0, custom={"train": 1}) if spread == 2 else on(1)
        config = PolicyConfig(backend="fsdp", model=MODEL, weight_sync=way, bucket_mib=16)
        policy = await (await Mesh.reserve(engine, 2, place)).spawn(FsdpPolicy, config)
        meshes = [await Mesh.reserve(engine, EACH, on(3 + each)) for each in range(HOSTS)]
        samplers = [await mesh.spawn(TorchSampler, SamplerConfig(model=MODEL, seed=1)) for mesh in meshes]
        times: list[float] = []
        for _ in range(WARM + rounds):
            began = time.perf_counter()
            weights = (await policy.weights()).read_by(EACH * HOSTS)
            await asyncio.gather(*(each.load(weights) for each in samplers))
            times.append(time.perf_counter() - began)
        return {"sync": median(times[WARM:])}
    finally:
        await engine.close()


def on(number: int) -> Resources:
    """A place on the host with this number, from 1."""
    return Resources(cpus=0, custom={f"node{number}": 1})


if __name__ == "__main__":
    main()
