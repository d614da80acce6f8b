"""Check whether a candidate's roles fit into the memory, by the estimates of `meshrl memory`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from meshrl.planning.space import Candidate, Devices
from meshrl.run import Asked, Held, Job, MemoryPlan, RunConfig, plan_memory

_GIB: Final = 2**30


@dataclass
class Room:
    """Checks the memory of candidates, and collects what to report about it."""

    load: Callable[[Sequence[str]], Job[RunConfig]]
    devices: Devices
    gib: float | None
    """GiB of each GPU, or of the machine if it computes on cores. None: as the meshes say."""
    is_asked: bool
    """True if there is a limit to compare with."""
    unknown: list[str] = field(default_factory=list)
    """Roles of unknown memory, with the reason."""
    known: dict[str, Held] = field(default_factory=dict)
    least: tuple[float, str] | None = None
    """The smallest shortage in GiB, and the overrides of that candidate."""
    refusals: dict[str, None] = field(default_factory=dict)
    """Reasons why axes were refused."""

    @classmethod
    def of(cls, load: Callable[[Sequence[str]], Job[RunConfig]], devices: Devices, gib: float | None) -> "Room":
        """Check GPUs always, with 80 GiB by default. With cores, check the machine's memory if `gib` is given."""
        return cls(load, devices, gib, devices.kind == "gpus" or gib is not None)

    def fits(self, candidate: Candidate) -> int | None:
        """The first variant of a candidate that fits. None if none does."""
        if not self.is_asked:
            return 0
        for variant in range(len(candidate.variants)):
            plan = self._plan(candidate, variant)
            roles = [held for mesh in plan.meshes for held in mesh.roles]
            if refused := [f"{held.role}: {held.unknown}" for held in roles if held.refused]:
                self.refusals |= dict.fromkeys(refused)
                return None
            for told in (f"{held.role}: {held.unknown}" for held in roles if held.memory is None):
                if told not in self.unknown:
                    self.unknown.append(told)
            missing = self._missing(plan)
            if missing <= 0:
                return variant
            if self.least is None or missing < self.least[0]:
                self.least = missing, " ".join(candidate.overrides(variant))
        return None

    def needed(self, candidate: Candidate, variant: int) -> float | None:
        """GiB of the fullest GPU, or of the machine. None if no role's memory is known."""
        if not self.is_asked:
            return None
        plan = self._plan(candidate, variant)
        if all(held.memory is None for mesh in plan.meshes for held in mesh.roles):
            return None
        return self._needed(plan)

    def why_nothing_fits(self) -> str:
        """The reason, with numbers."""
        if self.least is None:
            return f"no layout is possible: {'; '.join(self.refusals)}"
        missing, which = self.least
        where = " of each GPU" if self.devices.kind == "gpus" else ""
        return (
            f"nothing fits into memory: {missing:.1f} GiB more{where} are missing for the smallest candidate, "
            f"{which}: give more {self.devices.kind} or --memory, or ask `meshrl memory` what would save memory"
        )

    def _plan(self, candidate: Candidate, variant: int) -> MemoryPlan:
        job = self.load(candidate.overrides(variant))
        gib = self.gib if self.devices.kind == "gpus" else None
        return plan_memory(job.config, job.run, Asked(gib=gib), self.known)

    def _needed(self, plan: MemoryPlan) -> float:
        if self.devices.kind == "gpus":
            return max(mesh.needed for mesh in plan.meshes) / _GIB
        return sum(mesh.needed * mesh.ranks for mesh in plan.meshes) / _GIB

    def _missing(self, plan: MemoryPlan) -> float:
        if self.devices.kind == "cpus":
            return self._needed(plan) - (self.gib or 0.0)
        return max(-(mesh.headroom or 0) for mesh in plan.meshes) / _GIB
