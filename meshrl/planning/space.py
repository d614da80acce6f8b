"""The settings that a plan chooses from: how ranks are divided over meshes and along axes, and whether roles fit."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal, Self, TypeAlias, cast

from meshrl.config import Table
from meshrl.errors import ConfigError
from meshrl.roles import PolicyConfig, RoleConfig, SamplerConfig, axes_of, models_of
from meshrl.run import Job, MemoryOptions, MemoryPlan, MeshConfig, RoleMemory, plan_memory, tables_of
from meshrl.tasks import RewardConfig

Value: TypeAlias = "int | float | str | Mapping[str, Value]"
Load: TypeAlias = Callable[[Sequence[str]], Job]
"""Loads the configuration's job with further overrides."""

_WIDEST: Final = 8
"""Ranks along an axis other than dp at most, as many as a machine has."""
_HALVINGS: Final = 3
"""Number of times that a budget is halved to fit into memory."""
_UNCHANGED: Final = ("custom", "gib", "placement")
"""Settings of a mesh that do not depend on its ranks."""
_GIB: Final = 2**30


@dataclass(frozen=True)
class Devices:
    """The devices to divide: GPUs, one per rank, or cores."""

    count: int
    kind: Literal["gpus", "cpus"]

    @property
    def cores(self) -> int | None:
        """Cores of the machine, if it computes on them."""
        return self.count if self.kind == "cpus" else None


@dataclass(frozen=True)
class Layout:
    """The ranks of one mesh."""

    ranks: int
    each: int
    """GPUs or cores per rank."""
    axes: Mapping[str, int]
    """The last axis varies fastest. It contains dp and all axes above 1."""

    def __str__(self) -> str:
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items() if size > 1)
        cores = f", {self.each} cores each" if self.each > 1 else ""
        return f"{self.ranks} ({axes}{cores})" if axes else f"1 rank of {self.each} cores" if cores else "1"


@dataclass(frozen=True)
class Candidate:
    """A way to divide the devices."""

    trainer: Layout
    sampler: Layout
    shared: bool
    """True if both are on the same ranks."""
    ahead: int
    settings: Mapping[str, Value]
    """The settings by key."""
    variants: Sequence[Mapping[str, Value]]
    """Further settings. The first variant has none, and the first one that fits into memory applies."""

    @property
    def name(self) -> str:
        """A description."""
        where = "one mesh: " if self.shared else ""
        same = self.shared and self.trainer.axes == self.sampler.axes
        layout = f"{self.trainer}" if same else f"train {self.trainer}, sample {self.sampler}"
        return f"{where}{layout}, ahead {self.ahead}"

    @property
    def overrides(self) -> list[str]:
        """The settings for a command line."""
        return [f"{key}={_toml(value)}" for key, value in self.settings.items()]

    def varied(self, variant: int) -> Self:
        """The candidate with the settings of a variant."""
        return replace(self, settings={**self.settings, **self.variants[variant]})

    def table(self, table: Table) -> Table:
        """A configuration's tables with the settings applied."""
        changed = dict(table)
        for key, value in self.settings.items():
            inner = changed
            *above, last = key.split(".")
            for part in above:
                inner[part] = dict(cast("Table", inner.get(part) or {}))
                inner = cast("Table", inner[part])
            inner[last] = value
        return changed


def _toml(value: Value) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else str(value)


class Space:
    """All candidates of a configuration on some devices."""

    def __init__(self, job: Job, devices: Devices, aheads: Sequence[int], *, budgets: bool) -> None:
        """`aheads`: values for separate meshes. One mesh gains nothing by them and takes the lowest.

        `budgets`: vary slots and micro-batch budgets, because memory is known. Raises ConfigError if the algorithm has
        no policy or no sampler, which leaves nothing to divide.
        """
        policy, sampler, reward = (getattr(job.config, name, None) for name in ("policy", "sampler", "reward"))
        if not isinstance(policy, PolicyConfig) or not isinstance(sampler, SamplerConfig):
            raise ConfigError(
                f"{job.source}: a plan divides ranks between a policy and a sampler, and the algorithm has "
                f"{'no sampler' if isinstance(policy, PolicyConfig) else 'no policy'}"
            )
        calls = isinstance(reward, RewardConfig) and models_of(reward.backend) == "none"
        self.devices: Devices = devices
        self.policy: PolicyConfig = policy
        self.sampler: SamplerConfig = sampler
        self.reward: RoleConfig | None = cast("RoleConfig", reward) if calls else None
        """The reward if it calls a function, which needs no cores."""
        self.meshes: Mapping[str, MeshConfig] = job.run.meshes
        roles = [table for _, table in tables_of(job.config) if isinstance(table, RoleConfig)]
        divided = {policy.mesh, sampler.mesh, *([self.reward.mesh] if self.reward else [])}
        self.others: list[str] = sorted({role.mesh for role in roles} - divided)
        """Meshes of other roles, which stay unchanged."""
        self.engine: str | None = job.run.engine if "engine" in job.run.model_fields_set else None
        """The configured engine. None if meshrl chooses."""
        self.aheads: Sequence[int] | None = aheads if "ahead" in type(job.config).model_fields else None
        """None if the script has no `ahead`."""
        self.budgets = budgets

    @property
    def _count(self) -> int:
        """Number of devices to divide. Raises ConfigError if other meshes take all of them."""
        others = [self.meshes.get(name, MeshConfig()) for name in self.others]
        taken = sum(mesh.ranks * int(mesh.gpus if self.devices.kind == "gpus" else mesh.cpus or 0) for mesh in others)
        if taken >= self.devices.count:
            raise ConfigError(
                f"the meshes {', '.join(self.others)} take {taken} of {self.devices.count} {self.devices.kind}, and "
                "the policy and the sampler have none: give more, or let these roles share the policy's mesh"
            )
        return self.devices.count - taken

    def __iter__(self) -> Iterator[Candidate]:
        yield from self._together()
        yield from self._apart()

    def _together(self) -> Iterator[Candidate]:
        for trainer in self._layouts("Policy", self.policy.backend, self._count):
            for sampler in self._layouts("Sampler", self.sampler.backend, self._count):
                if (trainer.ranks, trainer.each) == (sampler.ranks, sampler.each):
                    yield self._candidate(trainer, sampler, min(self.aheads or (0,)), shared=True)

    def _apart(self) -> Iterator[Candidate]:
        for trains in _parts(self._count):
            trainers = self._layouts("Policy", self.policy.backend, trains)
            samplers = list(self._layouts("Sampler", self.sampler.backend, self._count - trains))
            for trainer, sampler, ahead in itertools.product(trainers, samplers, self.aheads or (0,)):
                yield self._candidate(trainer, sampler, ahead, shared=False)

    def _layouts(self, role: str, backend: str, count: int) -> Iterator[Layout]:
        axes = axes_of(role, backend)
        cores = self.devices.kind == "cpus"
        for ranks in (each for each in range(1, count + 1) if count % each == 0) if cores else (count,):
            if not axes and ranks > 1:
                continue
            for sizes in _sizes(ranks, [axis for axis in axes if axis != "dp"]):
                used = {axis: sizes[axis] for axis in axes if axis == "dp" or sizes[axis] > 1}
                yield Layout(ranks, count // ranks, used or {"dp": 1})

    def _candidate(self, trainer: Layout, sampler: Layout, ahead: int, *, shared: bool) -> Candidate:
        main = self.policy.mesh
        other = main if shared else self.sampler.mesh if self.sampler.mesh != main else "rollout"
        meshes: dict[str, Value] = {main: self._mesh(main, trainer)}
        settings: dict[str, Value] = {"run.meshes": meshes, "sampler.mesh": other}
        if self.aheads is not None:
            settings["ahead"] = ahead
        if not shared:
            meshes[other] = self._mesh(other, sampler)
        if self.reward:  # a function needs no cores, and on a trainer's mesh it would wait for updates
            of_its_own = "reward" if self.reward.mesh in (main, other, self.sampler.mesh) else self.reward.mesh
            settings["reward.mesh"] = main if shared else of_its_own
            if not shared:
                meshes[of_its_own] = {"cpus": 0}
        meshes |= {
            name: self.meshes[name].model_dump(exclude_defaults=True) for name in self.others if name in self.meshes
        }
        if self.engine == "local" or (self.engine is None and shared and trainer.ranks > 1):
            settings["run.engine"] = "processes" if len(meshes) > 1 or trainer.ranks > 1 else "local"
        if self.policy.axes:
            settings["policy.axes"] = trainer.axes
        if self.sampler.axes or (shared and sampler.axes != trainer.axes):
            settings["sampler.axes"] = sampler.axes
        return Candidate(trainer, sampler, shared, ahead, settings, self._variants())

    def _mesh(self, name: str, layout: Layout) -> dict[str, Value]:
        had = self.meshes.get(name, MeshConfig()).model_dump(exclude_defaults=True)
        mesh: dict[str, Value] = {"ranks": layout.ranks} if layout.ranks > 1 else {}
        mesh[self.devices.kind] = layout.each
        if set(layout.axes) != {"dp"}:
            mesh["axes"] = layout.axes
        return mesh | {key: had[key] for key in _UNCHANGED if key in had}

    def _variants(self) -> Sequence[Mapping[str, Value]]:
        if not self.budgets:
            return [{}]
        tokens, slots = self.policy.micro_batch_tokens, self.sampler.slots
        halved = sorted(itertools.product(range(_HALVINGS + 1), repeat=2), key=lambda each: (sum(each), each))
        return [
            ({"policy.micro_batch_tokens": tokens >> less} if less else {})
            | ({"sampler.slots": max(1, slots >> fewer)} if fewer else {})
            for less, fewer in halved
            if tokens >> less
        ]


def _parts(count: int) -> Iterator[int]:
    """Numbers of training devices: multiples of a sixteenth, and those where they or the rest are a power of two."""
    part = max(1, count // 16)
    for each in range(1, count):
        if each % part == 0 or each & (each - 1) == 0 or (count - each) & (count - each - 1) == 0:
            yield each


def _sizes(ranks: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Sizes whose product is the number of ranks: powers of two for these axes, and the rest for dp."""
    powers = [1 << power for power in range(_WIDEST.bit_length())]
    for sizes in itertools.product(powers, repeat=len(axes)):
        split = prod(sizes)
        if ranks % split == 0:
            yield {"dp": ranks // split, **dict(zip(axes, sizes, strict=True))}


class MemoryLimit:
    """Checks whether candidates fit into the memory, by the estimates of `meshrl memory`, and notes what it finds.

    `gib`: of each GPU, or of the machine if it computes on cores. GPUs are always checked, with 80 GiB by default. The
    machine's memory is checked if `gib` is given.
    """

    def __init__(self, load: Load, devices: Devices, gib: float | None) -> None:
        self._load = load
        self._on_gpus = devices.kind == "gpus"
        self._gib = gib
        self.applies: bool = self._on_gpus or gib is not None
        self.unknown: list[str] = []
        """Roles of unknown memory, with the reason."""
        self._estimates: dict[str, RoleMemory] = {}
        self._shortage: tuple[float, str] | None = None
        """The smallest shortage in GiB, and the overrides of that candidate."""
        self._refusals: dict[str, None] = {}
        """Reasons why axes were refused."""

    def fits(self, candidate: Candidate) -> Candidate | None:
        """The candidate in its first variant that fits. None if none does."""
        if not self.applies:
            return candidate
        for variant in map(candidate.varied, range(len(candidate.variants))):
            plan = self._plan(variant)
            unknown = [held for mesh in plan.meshes for held in mesh.roles if held.refused or held.memory is None]
            if refusals := [f"{held.role}: {held.unknown}" for held in unknown if held.refused]:
                self._refusals |= dict.fromkeys(refusals)
                return None
            notes = dict.fromkeys(f"{held.role}: {held.unknown}" for held in unknown)
            self.unknown += [note for note in notes if note not in self.unknown]
            if self._on_gpus:
                missing = max(-(mesh.headroom or 0) for mesh in plan.meshes) / _GIB
            else:
                missing = self._gib_of(plan) - (self._gib or 0.0)
            if missing <= 0:
                return variant
            if self._shortage is None or missing < self._shortage[0]:
                self._shortage = missing, " ".join(variant.overrides)
        return None

    def needed(self, candidate: Candidate) -> float | None:
        """GiB of the fullest GPU, or of the machine. None if no role's memory is known."""
        if not self.applies:
            return None
        plan = self._plan(candidate)
        known = any(held.memory is not None for mesh in plan.meshes for held in mesh.roles)
        return self._gib_of(plan) if known else None

    def why_nothing_fits(self) -> str:
        """The reason, with numbers."""
        if self._shortage is None:
            return f"no layout is possible: {'; '.join(self._refusals)}"
        missing, overrides = self._shortage
        where, devices = (" of each GPU", "gpus") if self._on_gpus else ("", "cpus")
        return (
            f"nothing fits into memory: {missing:.1f} GiB more{where} are missing for the smallest candidate, "
            f"{overrides}: give more {devices} or --memory, or ask `meshrl memory` what would save memory"
        )

    def _plan(self, candidate: Candidate) -> MemoryPlan:
        job, options = self._load(candidate.overrides), MemoryOptions(gib=self._gib if self._on_gpus else None)
        return plan_memory(job.config, job.run, options, self._estimates)

    def _gib_of(self, plan: MemoryPlan) -> float:
        needed = [mesh.needed * (1 if self._on_gpus else mesh.ranks) for mesh in plan.meshes]
        return (max(needed) if self._on_gpus else sum(needed)) / _GIB
