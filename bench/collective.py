"""`bench/weights.py --parts collective`: from two ranks of FSDP to two samplers, against gloo's own broadcast."""

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from bench.harness import Figure, at_most, figure, median, within
from meshrl import Actor, Gather, Mesh, PolicyConfig, Resources, SamplerConfig, Sum, Weights, endpoint, log
from meshrl.engines import make_engine
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_hf.live_weights import LiveWeights, offered
from meshrl_torch.sampler import TorchSampler

RANKS: Final = 2
"""Number of sending ranks, and of reading ranks."""
BUCKET: Final = 16
"""In MiB."""
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
        return offered(self._sender, self._trainable.optimizer.steps, None, self._trainable.shards())

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


async def collective(model: str, nbytes: int, engine: str, rounds: int) -> list[Figure]:
    """Time of both, and the memory that ours needs."""
    ranks = make_engine(engine)
    config = PolicyConfig(backend="fsdp", model=model, dtype="bfloat16", weight_sync="broadcast", bucket_mib=BUCKET)
    source = await (await Mesh.reserve(ranks, RANKS, Resources(cpus=0))).spawn(Source, config)
    sampling = SamplerConfig(model=model, dtype="bfloat16")
    takers = await (await Mesh.reserve(ranks, RANKS, Resources(cpus=0))).spawn(Taker, sampling)
    caster = await (await Mesh.reserve(ranks, 1 + RANKS, Resources(cpus=0))).spawn(Caster, nbytes)
    figures: list[Figure] = []

    async def send() -> None:
        weights = await source.bare()
        assert isinstance(weights, LiveWeights)
        await takers.load(weights.read_by(RANKS))

    for way in ("by gloo", "handed over"):
        await takers.open(way == "handed over")
        await asyncio.gather(source.begin(), takers.begin())
        for _ in range(WARM):
            await send()
        each = np.concatenate([await source.extra(), await takers.extra()])
        print(f"MiB of each sender and reader, {way}:", each.round().tolist())
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(WARM + rounds):
            for took, do in zip(times, (send, caster.cast), strict=True):
                began = time.perf_counter()
                await do()
                took.append(time.perf_counter() - began)
        ours, cast = (median(took[WARM:]) for took in times)
        name = f"{nbytes >> 20} MiB from 2 ranks to 2 samplers, {way}, against gloo's broadcast"
        figures += [
            within(name, ours, "s", cast, 1.5 if way == "by gloo" else 1.0),
            at_most("  most additional memory of a rank", float(each.max()), "MiB", 2 * BUCKET),
        ]
    proved: list[float] = []
    for _ in range(WARM):
        began = time.perf_counter()
        await takers.load((await source.weights()).read_by(RANKS))
        proved.append(time.perf_counter() - began)
    await ranks.close()
    return [*figures, figure("  with the model's computation, on policy and samplers", min(proved), "s", cast)]
