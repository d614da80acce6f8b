"""How well a run uses its machines: tokens a second, FLOPs utilisation and waits, from its events; and its memory."""

import asyncio
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from meshrl.events import CORES_OF, Call, Event, Span, Wait
from meshrl.mesh import free_cores, gpu_name
from meshrl.roles import Flops, ModelConfig, flops_of

SPEED: Final = "tokens a second of "
"""The gauge with this name and a mesh's."""
USE: Final = "FLOPs utilisation of "
"""The gauge with this name and a mesh's, as a share of the peak."""
WAITED: Final = "time waited of "
"""The gauge with this name and that of who waits, as a share of the time."""
_PASSES: Final = {"update": 3, "forward_backward": 3, "logprobs": 1, "score": 1, "values": 1, "advantages": 1}
"""Forward passes whose operations an endpoint needs for each token. A backward pass counts as two."""
_DRAWS: Final = "generate"
_MOST: Final = 10_000
"""Calls at most whose end is awaited."""
_GPUS: Final = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16 operations a second by a part of the GPU's name, as NVIDIA's data sheets have them."""
_EVERY: Final = 5.0
"""Seconds between two looks at the memory."""
_KEPT: Final = Path(".cache", "meshrl", "matmul.json")
"""Where the measured speed of a machine's cores is kept, in the home folder."""
_MEASURE: Final = """
import time, numpy as np
a = np.random.default_rng(0).random((1024, 1024), np.float32)
ended, best = time.perf_counter() + 1, 0.0
while (began := time.perf_counter()) < ended:
    a @ a
    best = max(best, 2 * 1024**3 / (time.perf_counter() - began))
print(best)
"""
"""Multiplies matrices of float32 for a second on all cores, and prints the operations of the best second."""


class MeshShape(NamedTuple):
    """A mesh, as far as its peak depends on it."""

    name: str
    ranks: int
    gpus: float
    """GPUs of each rank."""


class Health:
    """Adds up the calls and waits of a run, from its events."""

    def __init__(self) -> None:
        self._flops: dict[tuple[str, str], Flops] = {}
        """Operations of a forward pass, by the mesh and the class of the actor."""
        self._unclear: set[str] = set()
        """Meshes with several models of one class, whose calls cannot be told apart: their utilisation is unknown."""
        self._meshes: dict[str, MeshShape] = {}
        """The meshes of these actors."""
        self._core: float | None = None
        """Operations a second of a core. None before it is measured."""
        self._since = 0.0
        self._mesh_of: dict[int, tuple[str, str]] = {}
        """Mesh and actor of calls whose end was not seen."""
        self._drawing: set[tuple[str, str]] = set()
        """Meshes and actors that draw tokens."""
        self._tokens, self._operations, self._waited = (defaultdict[str, float](float) for _ in range(3))

    def see(self, events: Sequence[Event]) -> None:
        """Count events."""
        for event in events:
            if isinstance(event, Span):
                self._mesh_of[event.call] = event.mesh, event.actor
                if event.endpoint == _DRAWS:
                    self._drawing.add((event.mesh, event.actor))
            elif isinstance(event, Wait):
                self._waited[event.who] += event.ended - event.began
            elif isinstance(event, Call):
                place = self._mesh_of.pop(event.id, None)
                if place and event.tokens and event.endpoint != _DRAWS:
                    self._count(*place, event.tokens, event.rows or 1, _PASSES.get(event.endpoint, 0))

    async def learn(self, actor: str, config: ModelConfig, mesh: MeshShape) -> None:
        """Learn how many operations the model of an actor needs, and how many the cores of its mesh can do."""
        try:
            flops = await asyncio.to_thread(flops_of, config)
        except Exception:  # noqa: BLE001 -- what cannot be counted has no utilisation
            return
        if flops is None:
            return
        if self._flops.setdefault((mesh.name, actor), flops) != flops:
            self._unclear.add(mesh.name)
        self._meshes[mesh.name] = mesh
        if not mesh.gpus and self._core is None:
            self._core = await asyncio.to_thread(core_peak)

    def _count(self, mesh: str, actor: str, tokens: float, rows: float, passes: int) -> None:
        self._tokens[mesh] += tokens
        if (flops := self._flops.get((mesh, actor))) and passes:
            self._operations[mesh] += passes * flops.forward(rows, tokens / rows)

    def gauges(self, now: float, drawn: float | None, rows: float, known: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers since the last call, by the names of their gauges, and begin again.

        `now`: seconds since the start of the run. `drawn`: tokens that samplers drew for the `rows` of the step. None
        if they are unknown, as are then the speed and the utilisation of their meshes. `known`: the run's gauges.
        """
        for mesh, actor in self._drawing:
            self._count(mesh, actor, (drawn or 0.0) / len(self._drawing), rows or 1, 1)
        unknown = {mesh for mesh, _ in self._drawing} if drawn is None else set[str]()
        seconds = now - self._since
        found: dict[str, float] = {}
        if seconds > 0:
            found = {f"{SPEED}{mesh}": each / seconds for mesh, each in self._tokens.items() if mesh not in unknown}
            for mesh, operations in self._operations.items():
                if mesh not in unknown | self._unclear and (peak := self._peak(mesh, known)):
                    found[f"{USE}{mesh}"] = operations / seconds / peak
            found |= {f"{WAITED}{who}": min(1.0, waited / seconds) for who, waited in self._waited.items()}
        self.begin(now)
        return found

    def begin(self, now: float) -> None:
        """Forget what was counted, and count from now on."""
        self._since = now
        for counter in (self._tokens, self._operations, self._waited):
            counter.clear()
        if len(self._mesh_of) > _MOST:  # of calls that failed before their ranks had answered
            self._mesh_of.clear()

    def _peak(self, mesh: str, known: Mapping[str, float]) -> float | None:
        """Operations a second of all ranks of a mesh. None if the peak is unknown."""
        _, ranks, gpus = self._meshes.get(mesh, MeshShape(mesh, 1, 0.0))
        if gpus:
            peaks = (peak for part, peak in _GPUS.items() if part in gpu_name())
            return next((peak * gpus * ranks for peak in peaks), None)
        return self._core and self._core * known.get(f"{CORES_OF}{mesh}", free_cores() / ranks) * ranks


def core_peak() -> float | None:
    """Return the float32 operations a second of a core in matrix products, as measured once on this machine.

    The first call of a machine multiplies matrices for a second on all free cores. The result is kept in the user's
    folder. None if it cannot be measured.
    """
    cores, machine = free_cores(), f"{os.uname().nodename}, {free_cores()} cores"
    file = Path.home() / _KEPT
    known: dict[str, float] = {}
    """By machine: several may share this folder."""
    with suppress(OSError, ValueError):
        known = msgspec.json.decode(file.read_bytes(), type=dict[str, float])
    if found := known.get(machine):
        return found
    try:
        command = [sys.executable, "-c", _MEASURE]
        done = subprocess.run(command, capture_output=True, check=True, env={})  # noqa: S603 -- our own program
        peak = float(done.stdout) / cores
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode({**known, machine: peak}))
        part.replace(file)
    return peak


def resident_bytes() -> int | None:
    """Return the memory of this process and those below it, pages that they share counted in each. None if unknown.

    It is measured every few seconds, because that takes longer with each thread of these processes.
    """
    return _measured(os.getpid(), int(time.monotonic() / _EVERY))


@lru_cache(maxsize=1)
def _measured(own: int, _period: int) -> int | None:
    pages, found = 0, [own]
    for process in found:
        with suppress(OSError, ValueError):  # it has ended
            pages += int(Path(f"/proc/{process}/statm").read_text("utf-8").split()[1])
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                found += map(int, children.read_text("utf-8").split())
    return pages * os.sysconf("SC_PAGE_SIZE") or None
