"""Estimate the memory that the roles of a configuration need on a rank, before anything is allocated."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Final

from meshrl.config import Config, dotted
from meshrl.errors import ConfigError, MeshrlError, described
from meshrl.roles import (
    MemoryEstimate,
    MemoryTerm,
    ModelConfig,
    NewModel,
    PolicyConfig,
    ReferenceConfig,
    SamplerConfig,
    Sampling,
    Workload,
    memory_of,
    models_of,
)
from meshrl.run.config import MeshConfig, RunConfig, reads_reference, tables_of
from meshrl.run.folder import read_json
from meshrl.tasks import TaskConfig

GIB: Final = 2**30
_GPU_GIB: Final = 80.0
"""Assumed memory of a GPU in GiB."""
_CONTEXT: Final = MemoryTerm("CUDA and NCCL", GIB, "", "about 1 GiB for contexts, libraries and communicators")
_PROMPT: Final = 512
"""Assumed tokens of a prompt if nothing limits it."""
_COMPLETION: Final = 1024
"""Assumed tokens of the rest of a row if nothing is sampled."""
_TIGHT: Final = 0.05
"""Share of a rank's memory that should stay free, because allocators leave gaps."""


@dataclass(frozen=True)
class MemoryOptions:
    """Options of `meshrl memory`. None: use the configuration."""

    gpus: int | None = None
    """Number of ranks of the mesh, with one GPU each."""
    gib: float | None = None
    """GiB of memory of each rank."""
    prompt: int | None = None
    """Tokens of the longest prompt."""
    completion: int | None = None
    """Tokens of the longest completion."""


@dataclass(frozen=True)
class RoleMemory:
    """A role on a rank."""

    role: str
    """Its key in the configuration."""
    backend: str
    memory: MemoryEstimate | None
    """None if unknown."""
    unknown: str = ""
    """Why the memory is unknown."""
    refused: bool = False
    """True if it is unknown because the backend refuses the axes."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of the fullest rank of a mesh."""

    mesh: str
    ranks: int
    axes: dict[str, int]
    has_gpu: bool
    gib: float | None
    """Memory of the rank in GiB. None if not set."""
    roles: list[RoleMemory]
    beside: list[MemoryTerm]
    """Memory outside the roles."""
    overlaps: bool
    """True if rollouts continue while roles of this rank train."""

    def terms(self, *, host: bool) -> Iterator[tuple[str, MemoryTerm]]:
        """Yield the terms of one of the rank's memories, each with its role."""
        terms = [(role.role, term) for role in self.roles if role.memory for term in role.memory.terms]
        terms += [("", term) for term in self.beside]
        yield from ((role, term) for role, term in terms if term.host is host)

    def peak(self, *, host: bool) -> tuple[int, str]:
        """Return the largest number of bytes held at once, and the call: permanent terms and those of one call."""
        always, calls = 0, Counter[str]()
        for role, term in self.terms(host=host):
            if term.during:
                calls[f"{role}.{term.during}"] += term.nbytes
            else:
                always += term.nbytes
        if self.overlaps:  # rows are drawn during other computations
            always += sum([calls.pop(call) for call in [*calls] if call.endswith(".generate")])
        name = max(calls, key=lambda call: calls[call], default="")
        return always + calls[name], name

    @property
    def unknown(self) -> list[str]:
        """Roles that the sums leave out, because their needs are unknown."""
        return [held.role for held in self.roles if held.memory is None]

    @property
    def needed(self) -> int:
        """Peak bytes of the memory that `gib` limits. Roles of unknown need are left out."""
        return self.peak(host=not self.has_gpu)[0]

    @property
    def headroom(self) -> int | None:
        """Free bytes. Negative if the roles do not fit.

        None if the memory is not set, or if roles of unknown need have to share the rest.
        """
        if self.gib is None:
            return None
        left = int(self.gib * GIB) - self.needed
        return None if left >= 0 and self.unknown else left


@dataclass(frozen=True)
class Saving:
    """A setting, and the bytes that it saves on the fullest rank of a mesh."""

    setting: str
    mesh: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the ranks of a configuration."""

    meshes: list[RankMemory]
    assumed: list[str]
    """Assumptions about what the configuration leaves open."""
    savings: list[Saving] = field(default_factory=list)


def plan_memory(
    config: Config, run: RunConfig, options: MemoryOptions = MemoryOptions(), known: dict[str, RoleMemory] | None = None
) -> MemoryPlan:
    """Estimate what each mesh's fullest rank holds. Allocates nothing and reads no weights.

    `known` caches estimates of the same tables, and is added to. Raises ConfigError if `options.gpus` fits several
    meshes. What a backend cannot estimate is reported with its role.
    """
    tables = [
        (dotted(path), table)
        for path, table in tables_of(config)
        if isinstance(table, ModelConfig) and table.role and models_of(table.backend) not in ("none", "ignored")
        if type(table) is not ReferenceConfig or reads_reference(config)
    ]
    meshes = _meshes(run, sorted({table.mesh for _, table in tables}), options.gpus)
    work, assumed = _workloads(config, options)
    known = {} if known is None else known
    planned: list[RankMemory] = []
    for name, mesh in meshes.items():
        has_gpu = mesh.gpus > 0
        gib = options.gib or mesh.gib or (_GPU_GIB if has_gpu else None)
        here = [(role, table) for role, table in tables if table.mesh == name]
        roles: list[RoleMemory] = []
        for role, table in here:
            load = work(table, mesh, gib if has_gpu else None)
            key = f"{role} {table!r} {load!r}"
            if key not in known:
                known[key] = _role_memory(role, table, load)
            roles.append(known[key])
        trains = any(isinstance(table, PolicyConfig) for _, table in here)
        overlaps = trains and int(getattr(config, "ahead", 0)) > 0
        beside = [_CONTEXT] if has_gpu else []
        axes = dict(mesh.axes) or {"dp": mesh.ranks}
        planned.append(RankMemory(name, mesh.ranks, axes, has_gpu, gib, roles, beside, overlaps))
    return MemoryPlan(planned, assumed)


def _meshes(run: RunConfig, named: Sequence[str], gpus: int | None) -> dict[str, MeshConfig]:
    """Return the meshes that roles name. With `gpus`, the only mesh gets this number of ranks with one GPU each."""
    meshes = {name: run.meshes.get(name, MeshConfig()) for name in named}
    if gpus is None:
        return meshes
    if len(meshes) != 1:
        settings = " ".join(f"run.meshes.{name}.ranks=N" for name in meshes)
        raise ConfigError(
            f"--gpus {gpus}: the roles are on {len(meshes)} meshes ({', '.join(meshes)}): set the number of each with "
            f"{settings} instead"
        )
    ((name, mesh),) = meshes.items()
    others = prod(size for axis, size in mesh.axes.items() if axis != "dp")
    if gpus % others:
        raise ConfigError(f"--gpus {gpus}: the axes {mesh.axes} of the mesh {name!r} need a multiple of {others}")
    axes = {**mesh.axes, "dp": gpus // others} if mesh.axes else {}
    return {name: mesh.model_copy(update={"ranks": gpus, "axes": axes, "gpus": 1.0})}


def doubts_of_memory(config: Config, run: RunConfig) -> list[str]:
    """For each mesh with a memory limit, say if its roles need more, nearly all, or an unknown amount.

    For a mesh with GPUs and no limit, say if they need more than 80 GiB.
    """
    if not any(mesh.gib or mesh.gpus for mesh in run.meshes.values()):
        return []
    doubts: list[str] = []
    for mesh in plan_memory(config, run).meshes:
        if mesh.gib is None:
            continue
        is_set = run.meshes[mesh.mesh].gib is not None
        _, call = mesh.peak(host=not mesh.has_gpu)
        needs = f"run.meshes.{mesh.mesh}: a rank needs about {mesh.needed / GIB:.1f} GiB{f' in {call}' if call else ''}"
        advice = "`meshrl memory` shows what needs it, and what would save memory"
        if mesh.headroom is not None and mesh.headroom < 0:
            has = f"has gib = {mesh.gib:g}" if is_set else f"is taken to have {mesh.gib:g}, because no gib is set"
            doubts.append(f"{needs}, and {has}: {advice}")
        elif is_set and mesh.headroom is None:
            reasons = "; ".join(dict.fromkeys(role.unknown for role in mesh.roles if role.memory is None))
            doubts.append(f"{needs}, without that of {', '.join(mesh.unknown)}, which is unknown: {reasons}")
        elif is_set and (mesh.headroom or 0) < _TIGHT * mesh.gib * GIB:
            doubts.append(f"{needs}, which leaves less than a twentieth of gib = {mesh.gib:g}: {advice}")
    return doubts


def savings_of(
    plan: MemoryPlan, options: MemoryOptions, plan_with: Callable[[Sequence[str], MemoryOptions], MemoryPlan]
) -> list[Saving]:
    """Return what each setting that a backend names would save, and what more ranks would, the most first.

    `plan_with` plans the configuration with further settings. Settings that it refuses are left out.
    """
    savings: list[Saving] = []
    for mesh in plan.meshes:
        changes: list[Sequence[str]] = [
            [f"{role.role}.{knob}"] for role in mesh.roles if role.memory for knob in role.memory.knobs
        ]
        tried = [(" ".join(settings), settings, options) for settings in changes]
        if options.gpus:
            tried.append((f"--gpus {2 * options.gpus}", [], replace(options, gpus=2 * options.gpus)))
        else:
            tried += [(" ".join(settings), settings, options) for settings in _other_shapes(mesh)]
        for setting, settings, given in tried:
            try:
                plan_then = plan_with(settings, given)
            except MeshrlError:
                continue
            then = next(each for each in plan_then.meshes if each.mesh == mesh.mesh)
            if then.unknown == mesh.unknown and then.needed < mesh.needed:
                savings.append(Saving(setting, mesh.mesh, mesh.needed - then.needed))
    return sorted(savings, key=lambda saving: -saving.nbytes)


def _other_shapes(mesh: RankMemory) -> Iterator[Sequence[str]]:
    """Yield shapes with twice the ranks, and with matrices split over two of them."""
    at, dp = f"run.meshes.{mesh.mesh}", mesh.axes.get("dp", 1)
    explicit = mesh.axes != {"dp": mesh.ranks}
    yield [f"{at}.ranks={2 * mesh.ranks}", *([f"{at}.axes.dp={2 * dp}"] if explicit else [])]
    if dp % 2 == 0:
        yield [f"{at}.axes.dp={dp // 2}", f"{at}.axes.tp={2 * mesh.axes.get('tp', 1)}"]


def _role_memory(role: str, table: ModelConfig, work: Workload) -> RoleMemory:
    try:
        memory = memory_of(table, work)
    except MeshrlError as error:
        return RoleMemory(role, table.backend, None, str(error), isinstance(error, ConfigError))
    except Exception as error:  # noqa: BLE001 -- an estimate must not end a run: a model's code may do anything in a rehearsal
        return RoleMemory(role, table.backend, None, f"its rehearsal failed: {described(error)}")
    unknown = f"the backend {table.backend!r} does not report it" if memory is None else ""
    return RoleMemory(role, table.backend, memory, unknown)


def _workloads(
    config: Config, options: MemoryOptions
) -> tuple[Callable[[ModelConfig, MeshConfig, float | None], Workload], list[str]]:
    """Return the work of each role, by its table, its mesh and the GiB of its GPU, and what is assumed about it."""
    task, sampling = getattr(config, "task", None), getattr(config, "sampling", None)
    assumed: list[str] = []
    prompt = options.prompt or (task.max_prompt_tokens if isinstance(task, TaskConfig) else None)
    if prompt is None:
        prompt = _PROMPT
        assumed.append(f"prompts of {prompt} tokens: change it with task.max_prompt_tokens or --prompt")
    completion = options.completion or (sampling.max_tokens if isinstance(sampling, Sampling) else None)
    if completion is None:
        completion = _COMPLETION
        assumed.append(f"completions of {completion} tokens: change it with --completion")
    n = int(getattr(sampling, "n", 1))
    drawn = int(getattr(config, "prompts", None) or getattr(config, "rows", None) or 1) * n
    updated = -(-drawn // int(getattr(config, "minibatches", 1)))

    def work(table: ModelConfig, mesh: MeshConfig, gib: float | None) -> Workload:
        longest = longest_of(table.model) or prompt + completion
        fits = min(completion, longest - 1)
        return Workload(
            axes=dict(table.axes) or dict(mesh.axes) or {"dp": mesh.ranks},
            prompt=min(prompt, longest - fits),
            completion=fits,
            rows=drawn if isinstance(table, SamplerConfig) else updated,
            n=n,
            gpu=int((gib or 0) * GIB * min(1.0, mesh.gpus or 1.0)),
        )

    return work, assumed


def longest_of(model: str | NewModel) -> int | None:
    """Return the model's longest sequence in tokens. None if its folder does not say."""
    if isinstance(model, NewModel):
        return model.max_tokens
    file = Path(model) / "config.json"
    shape = read_json(file)  # a damaged file is reported when the model loads
    inner = shape.get("text_config")
    longest = (inner if isinstance(inner, dict) else shape).get("max_position_embeddings")
    return longest if isinstance(longest, int) else None
