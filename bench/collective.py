"""`bench/weights.py --parts collective`: from two ranks of FSDP to two samplers, against gloo's own broadcast."""

import asyncio
import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch
import torch.distributed as dist

from bench.harness import Figure, at_most, figure, median, within
from meshrl import Actor, Gather, Mesh, PolicyConfig, Resources, SamplerConfig, Sum, Weights, endpoint, log
from meshrl.engines import make_engine
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.weights.live_weights import LiveWeights, offer_weights
from meshrl_torch.wire.bucket_bytes import fingerprint
from meshrl_torch.wire.collective import IN_FLIGHT

RANKS: Final = 2
"""Number of sending ranks, and of reading ranks."""
BUCKET: Final = 16
"""In MiB."""
PIECE: Final = 4 << 20
"""Bytes of the larger tensors' shards."""
WARM: Final = 2
MIB: Final = 2**20


class Meter:
    """The peak of a process's additional memory, sampled every five milliseconds."""

    def __init__(self, *, opens: bool = False) -> None:
        """`opens`: shared memory that the process maps belongs to others."""
        self._kinds = ("RssAnon",) if opens else ("RssAnon", "RssShmem")
        log.info("memory is watched")  # loads the modules that write log lines
        ctypes.CDLL(None).malloc_trim(0)  # else earlier freed memory would be reused unnoticed
        self._had = self._most = _own(self._kinds)
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> float:
        """Stop, because sampling takes time too. Returns the additional memory in MiB."""
        self._ended.set()
        return (self._most - self._had) / MIB

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._most = max(self._most, _own(self._kinds))


def _own(kinds: Sequence[str]) -> int:
    """Bytes of a process's memory, of these kinds of the system's."""
    status = Path("/proc/self/status").read_text("ascii")
    return sum(int(status.partition(f"{kind}:")[2].split()[0]) << 10 for kind in kinds)


class Source(FsdpPolicy):
    """Sends its weights, optionally without a probe."""

    @endpoint
    async def begin(self) -> Sum[int]:
        """Start measuring memory."""
        self._meter = Meter()
        return 1

    @endpoint
    async def bare(self) -> Gather[Weights]:
        """As `weights`, without a probe: no model runs."""
        assert self._sender
        return offer_weights(self._sender, self._trainable.slot(None).optimizer.steps, None, self._trainable.shards())

    @endpoint
    async def extra(self) -> Gather[np.ndarray]:
        """Stop measuring memory. Returns the peak of additional memory in MiB."""
        return np.array([self._meter.end()])


class Taker(TorchSampler):
    """Takes weights as a sampler does."""

    @endpoint
    async def open(self, yes: bool) -> Sum[int]:
        """From now on, open the policy's memory or not."""
        os.environ["MESHRL_HANDOVER"] = str(int(yes))
        self._opens = yes
        return 1

    @endpoint
    async def begin(self) -> Sum[int]:
        """Start measuring memory."""
        for tensor in self._taken.values():
            tensor.add_(0)  # else the model's file is mapped, and becomes private memory with the first weights
        self._meter = Meter(opens=self._opens)
        return 1

    @endpoint
    async def extra(self) -> Gather[np.ndarray]:
        """Stop measuring memory. Returns the peak of additional memory in MiB."""
        return np.array([self._meter.end()])


class Caster(Actor):
    """Takes part in a broadcast."""

    def __init__(self, nbytes: int) -> None:
        dist.init_process_group("gloo")
        self._tensor = torch.ones(nbytes // 2, dtype=torch.bfloat16)

    @endpoint
    async def cast(self) -> Sum[int]:
        """Give all ranks what the first one has."""
        await asyncio.to_thread(dist.broadcast, self._tensor, 0)
        return 1


class Limit(Actor):
    """Sends its shards in buckets, without plans, calls or stores: half of the ranks are senders, the others read."""

    def __init__(self, nbytes: int) -> None:
        dist.init_process_group("gloo")
        self._rank, readers = dist.get_rank(), [RANKS + reader for reader in range(RANKS)]
        groups = [dist.new_group([sender, *readers]) for sender in range(RANKS)]
        self._groups = cast("list[dist.ProcessGroup]", groups)
        sends = self._rank < RANKS
        length = nbytes // 2 // (RANKS if sends else 1)
        self._tensor = torch.ones(length, dtype=torch.float32 if sends else torch.bfloat16)
        self._slots = torch.empty(IN_FLIGHT, PIECE // 2, dtype=torch.bfloat16)

    @endpoint
    async def send(self) -> Sum[int]:
        """Round and broadcast the shards. Readers take them in place."""
        await asyncio.to_thread(self._send if self._rank < RANKS else self._read)
        return 1

    def _send(self) -> None:
        flying = deque[dist.Work]()
        for number, piece in enumerate(self._tensor.split(PIECE // 2)):
            if len(flying) == IN_FLIGHT:
                flying.popleft().wait()
            slot = self._slots[number % IN_FLIGHT, : len(piece)]
            flying.append(broadcast(slot.copy_(piece), self._rank, self._groups[self._rank]))
            self._prove(slot)
        for work in flying:
            work.wait()

    def _read(self) -> None:
        shards = (shard.split(PIECE // 2) for shard in self._tensor.chunk(RANKS))
        flying = deque[tuple[dist.Work, torch.Tensor]]()
        for pieces in zip(*shards, strict=True):
            for sender, piece in enumerate(pieces):
                if len(flying) == IN_FLIGHT:
                    self._arrive(flying)
                flying.append((broadcast(piece, sender, self._groups[sender]), piece))
        while flying:
            self._arrive(flying)

    def _arrive(self, flying: deque[tuple[dist.Work, torch.Tensor]]) -> None:
        work, piece = flying.popleft()
        work.wait()
        self._prove(piece)

    def _prove(self, piece: torch.Tensor) -> None:
        """Do nothing with a piece that was sent or has arrived."""


class FingerprintedLimit(Limit):
    """Also fingerprints each piece, on senders and readers."""

    def _prove(self, piece: torch.Tensor) -> None:
        fingerprint(piece)


def broadcast(tensor: torch.Tensor, sender: int, group: dist.ProcessGroup) -> dist.Work:
    """Start a broadcast."""
    return cast("dist.Work", dist.broadcast(tensor, sender, group, async_op=True))


async def collective(model: str, nbytes: int, engine: str, rounds: int) -> list[Figure]:
    """Time of ours, of gloo's broadcast and of two limits, and the memory that ours needs."""
    ranks = make_engine(engine)
    config = PolicyConfig(backend="fsdp", model=model, dtype="bfloat16", weight_sync="broadcast", bucket_mib=BUCKET)
    source = await (await Mesh.reserve(ranks, RANKS, Resources(cpus=0))).spawn(Source, config)
    sampling = SamplerConfig(model=model, dtype="bfloat16")
    takers = await (await Mesh.reserve(ranks, RANKS, Resources(cpus=0))).spawn(Taker, sampling)
    caster = await (await Mesh.reserve(ranks, 1 + RANKS, Resources(cpus=0))).spawn(Caster, nbytes)
    limit = await (await Mesh.reserve(ranks, 2 * RANKS, Resources(cpus=0))).spawn(Limit, nbytes)
    proved_limit = await (await Mesh.reserve(ranks, 2 * RANKS, Resources(cpus=0))).spawn(FingerprintedLimit, nbytes)
    figures: list[Figure] = []

    async def send() -> None:
        weights = await source.bare()
        assert isinstance(weights, LiveWeights)
        await takers.load(weights.read_by(RANKS))

    for way, target in (("by gloo", 1.5), ("handed over", 1.0)):
        await takers.open(way == "handed over")
        await asyncio.gather(source.begin(), takers.begin())
        for _ in range(WARM):
            await send()
        each = np.concatenate([await source.extra(), await takers.extra()])
        print(f"MiB of each sender and reader, {way}:", each.round().tolist())
        times: tuple[list[float], ...] = ([], [], [], [])
        for _ in range(WARM + rounds):
            for took, do in zip(times, (send, caster.cast, proved_limit.send, limit.send), strict=True):
                began = time.perf_counter()
                await do()
                took.append(time.perf_counter() - began)
        ours, plain, prints, casts = (median(took[WARM:]) for took in times)
        name = f"{nbytes >> 20} MiB from 2 ranks to 2 samplers, {way}, against gloo's broadcast"
        figures += [
            within(name, ours, "s", plain, target),
            figure("  against gloo with casts and fingerprints alone", ours, "s", prints),
            figure("  against gloo with casts alone", ours, "s", casts),
            at_most("  most additional memory of a rank", float(each.max()), "MiB", 2 * BUCKET),
        ]
    proved: list[float] = []
    for _ in range(WARM):
        began = time.perf_counter()
        await takers.load((await source.weights()).read_by(RANKS))
        proved.append(time.perf_counter() - began)
    await ranks.close()
    return [*figures, figure("  with the model's computation, on policy and samplers", min(proved), "s", plain)]
