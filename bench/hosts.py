"""Weights and rows between hosts with slow links, against one copy of the bytes over one link by a bare socket.

    sudo python bench/hosts.py --json F [--mib 128] [--rate 1e9] [--rounds N]

Five hosts made of namespaces (docs/hosts.md), each with a Ray node and a cable of `--rate` bits per second.

weights  A trainer on the first host makes a new version, until 8 samplers on the 4 others have loaded it and verified
         every fingerprint. The peers are 8 direct copies, one socket per sampler, all from the trainer's host at once.
         The lower limit is a chain of bare sockets from host to host, which forward everything without keeping or
         verifying it.
batch    Rows made on the second host are read on the third: bytes per second, against those of the socket.

All hosts share this machine's processors. If these are busy all the time, the links are not the bottleneck, so their
load is reported. About two minutes. Needs root.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from subprocess import PIPE
from typing import Final

import numpy as np
import psutil

from bench.harness import Figure, arguments, at_least, figure, median, report, take_turns, within
from meshrl import Actor, Batch, Gather, Mesh, Ragged, Resources, Shard, Sum, Weights, endpoint
from meshrl.data import WeightSource
from meshrl.engines.ray import RayEngine
from meshrl.mesh import EVERY
from tests.support.cluster import Cluster, Host, missing

HOSTS: Final = 4
"""Number of hosts with samplers."""
EACH: Final = 2
"""Samplers per host."""
TENSOR: Final = 2**21
"""Bytes per tensor."""
WARM: Final = 1
MIB: Final = 2**20


class Trainer(Actor):
    """Holds a model's weights, and trains nothing."""

    def __init__(self, nbytes: int) -> None:
        values = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self._tensors = {str(start): values[start : start + TENSOR] for start in range(0, nbytes, TENSOR)}
        self._source = WeightSource(changes=False)
        self._version = 0

    @endpoint
    async def weights(self) -> Gather[Weights, EVERY]:
        """Return a new version."""
        self._version += 1
        return self._source.weights(self._version, self._tensors.items(), None)


class Sampler(Actor):
    """Takes weights, and samples nothing."""

    @endpoint
    async def take(self, weights: Weights) -> Sum[int]:
        """The number of tensors that differ from what was sent."""
        return sum(len(bucket.damaged()) for bucket in weights.buckets)


class Rows(Actor):
    """Makes rows, and reads them."""

    def __init__(self, nbytes: int) -> None:
        self._tokens = np.arange(nbytes // 4, dtype=np.int32)

    @endpoint
    async def make(self) -> Gather[Batch]:
        """Return sixteen rows."""
        offsets = np.linspace(0, len(self._tokens), 17, dtype=np.int64)
        return Batch.of(tokens=Ragged(self._tokens, offsets))

    @endpoint
    async def read(self, batch: Shard[Batch]) -> Sum[int]:
        """The number of tokens, once all have arrived."""
        return len(batch.tokens.values)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--mib", type=int, default=128, help="how much (default: 128)")
    parser.add_argument("--rate", type=float, default=1e9, help="bits a second of each cable (default: 1e9)")
    parser.add_argument("--on", help=argparse.SUPPRESS)  # address of the cluster on whose first host this runs
    options = parser.parse_args()
    if options.on:
        print(json.dumps(asyncio.run(timed_on(options.on, options.mib * MIB, options.rounds))))
        return
    if reason := missing():
        print(f"not measured: {reason}")
        return
    with Cluster(1 + HOSTS) as cluster:
        for host in cluster.hosts:
            host.slow(rate=options.rate)
        figures = measure(cluster, options.mib, options.rounds)
    report(f"{1 + HOSTS} hosts with cables of {options.rate / 1e6:.0f} Mbit/s", figures, options.json)


def measure(cluster: Cluster, mib: int, rounds: int) -> list[Figure]:
    """Measure everything, the sockets before and after the rest."""
    first, *others = cluster.hosts
    turns = {
        "one": lambda: copied(first, others[:1], mib),
        "chain": lambda: copied(first, others[:1], mib, others[1:]),
        "direct": lambda: copied(first, [host for host in others for _ in range(EACH)], mib),
    }
    with served(others):
        before = take_turns(turns, 1)
        ours = asked(cluster, mib, rounds)
        after = take_turns(turns, 1)
    one, chain, direct = (median(before[name] + after[name]) for name in turns)
    sent, busy = ours["sent"] / (mib * MIB), ours["busy"]
    samplers, rate = HOSTS * EACH, mib * MIB / 1e6
    return [
        within(f"{mib} MiB of weights to {samplers} samplers, against one copy", ours["weights"], "s", one, 1.3),
        figure("  the same, against a chain of bare sockets", ours["weights"], "s", chain),
        figure(f"  the same, against {samplers} direct copies", ours["weights"], "s", direct),
        figure("  bytes that leave the trainer's host, against one copy", sent * mib, "MiB", mib),
        figure("  processors busy", busy, "%"),
        at_least("rows from host to host, against one copy", rate / ours["batch"], "MB/s", rate / one, 0.8),
    ]


def asked(cluster: Cluster, mib: int, rounds: int) -> dict[str, float]:
    """The measurements of a controller on the first host, and the bytes on its cable for one version of the weights."""
    command = [sys.executable, __file__, "--on", cluster.address, "--mib", str(mib), "--rounds", str(rounds)]
    process = cluster.hosts[0].start(command, stdout=PIPE)
    before = cluster.hosts[0].traffic()[0]
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the controller on the first host ended with status {process.returncode}")
    sent = (cluster.hosts[0].traffic()[0] - before) / (WARM + rounds)
    return {**json.loads(said.splitlines()[-1]), "sent": sent}


async def timed_on(address: str, nbytes: int, rounds: int) -> dict[str, float]:
    """Seconds of each, with the controller here."""
    engine = RayEngine(address)
    try:
        trainer = await (await Mesh.reserve(engine, 1, on(1))).spawn(Trainer, nbytes)
        meshes = [await Mesh.reserve(engine, EACH, on(2 + each)) for each in range(HOSTS)]
        samplers = [await mesh.spawn(Sampler) for mesh in meshes]
        maker = await (await Mesh.reserve(engine, 1, on(2))).spawn(Rows, nbytes)
        reader = await (await Mesh.reserve(engine, 1, on(3))).spawn(Rows, 0)
        weights: list[float] = []
        batch: list[float] = []
        busy: list[float] = []
        for _ in range(WARM + rounds):
            psutil.cpu_percent()
            began = time.perf_counter()
            made = await trainer.weights()
            damaged = await asyncio.gather(*(each.take(made) for each in samplers))
            weights.append(time.perf_counter() - began)
            busy.append(psutil.cpu_percent())
            assert not any(damaged), damaged
        for _ in range(WARM + rounds):
            began = time.perf_counter()
            assert await reader.read(await maker.make()) == nbytes // 4
            batch.append(time.perf_counter() - began)
        values = {"weights": weights, "batch": batch, "busy": busy}
        return {name: median(each[WARM:]) for name, each in values.items()}
    finally:
        await engine.close()


def on(number: int) -> Resources:
    """Resources on the host with this number, from 1."""
    return Resources(cpus=0, custom={f"node{number}": 1})


SERVER: Final = """
import os, socket, sys
server = socket.create_server(("", 1234))
print("ready", flush=True)
memory = memoryview(bytearray(1 << 20))
while True:
    came, _ = server.accept()
    if os.fork() == 0:
        to = [name for name in came.recv(1000).decode().split() if name]
        came.sendall(b"x")
        if to:
            on = socket.create_connection((to[0], 1234))
            on.sendall(" ".join(to[1:]).encode() or b" ")
            on.recv(1)
        while got := came.recv_into(memory):
            if to:
                on.sendall(memory[:got])
        if to:
            on.shutdown(socket.SHUT_WR)
            on.recv(1)
        came.sendall(b"x")
        break
    came.close()
"""
"""Receives bytes, and forwards them along the hosts that the sender names."""
CLIENT: Final = """
import socket, sys
block = bytes(1 << 20)
with socket.create_connection((sys.argv[1], 1234)) as server:
    server.sendall(" ".join(sys.argv[3:]).encode() or b" ")
    server.recv(1)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(int(sys.argv[2])):
        server.sendall(block)
    server.shutdown(socket.SHUT_WR)
    server.recv(1)
"""


@contextmanager
def served(hosts: Sequence[Host]) -> Generator[None]:
    """Run the receiving server on each of these hosts."""
    servers = [host.start([sys.executable, "-c", SERVER], stdout=PIPE) for host in hosts]
    for server in servers:
        assert server.stdout
        server.stdout.readline()
    yield
    for server in servers:
        server.kill()
        server.communicate()


def copied(sender: Host, to: Sequence[Host], mib: int, then: Sequence[Host] = ()) -> float:
    """Seconds until `mib` MiB have arrived at each of these hosts, by concurrent bare sockets.

    `then`: hosts that get them too, each from the previous one.
    """
    command, others = [sys.executable, "-c", CLIENT], [host.name for host in then]
    clients = [sender.start([*command, host.name, str(mib), *others], stdin=PIPE, stdout=PIPE) for host in to]
    for client in clients:
        assert client.stdout
        client.stdout.readline()
    began = time.perf_counter()
    for client in clients:
        assert client.stdin
        client.stdin.write("\n")
        client.stdin.flush()
    for client in clients:
        client.communicate()
    took = time.perf_counter() - began
    if any(client.returncode for client in clients):
        raise SystemExit("a bare socket failed, as its error above says: there is nothing to compare with")
    return took


if __name__ == "__main__":
    main()
