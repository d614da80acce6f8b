"""Estimate the memory that the roles of a configuration need on a rank, before anything is allocated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from meshrl.config import Config, dotted
from meshrl.errors import ConfigError, MeshrlError, described
from meshrl.roles import (
    Memory,
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    SamplerConfig,
    Sampling,
    Term,
    Work,
    memory_of,
    models_of,
)
from meshrl.run.check_model import longest_of
from meshrl.run.config import MeshConfig, RunConfig
from meshrl.run.tables import reads_reference, tables_of
from meshrl.tasks import TaskConfig

GIB: Final = 2**30
_A_GPU: Final = 80.0
"""Assumed memory of a GPU in GiB."""
_CONTEXT: Final = Term("CUDA and NCCL", GIB, "", "about 1 GiB for contexts, libraries and communicators")
_PROMPT: Final = 512
"""Assumed tokens of a prompt if nothing limits it."""
_COMPLETION: Final = 1024
"""Assumed tokens of the rest of a row if nothing is sampled."""
_TIGHT: Final = 0.05
"""Share of a rank's memory that should stay free, because allocators leave gaps."""


@dataclass(frozen=True)
class Asked:
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
class Held:
    """A role on a rank."""

    role: str
    """Its key in the configuration."""
    backend: str
    memory: Memory | None
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
    roles: list[Held]
    beside: list[Term]
    """Memory outside the roles."""
    overlaps: bool
    """True if rollouts continue while roles of this rank train."""

    def terms(self, *, host: bool) -> Iterator[tuple[str, Term]]:
        """Yield the terms of one of the rank's memories, each with its role."""
        for held in self.roles:
            for term in held.memory.terms if held.memory else ():
                if term.host is host:
                    yield held.role, term
        for term in self.beside:
            if term.host is host:
                yield "", term

    def peak(self, *, host: bool) -> tuple[int, str]:
        """Return the largest number of bytes held at once, and the call: permanent terms and those of one call."""
        always, calls = 0, dict[str, int]()
        for role, term in self.terms(host=host):
            if term.during:
                call = f"{role}.{term.during}"
                calls[call] = calls.get(call, 0) + term.nbytes
            else:
                always += term.nbytes
        if self.overlaps:  # rows are drawn during other computations
            drawn = [call for call in calls if call.endswith(".generate")]
            beside = sum(calls.pop(call) for call in drawn)
            always += beside
        name = max(calls, key=lambda call: calls[call], default="")
        return always + calls.get(name, 0), name

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
    config: Config, run: RunConfig, asked: Asked = Asked(), known: dict[str, Held] | None = None
) -> MemoryPlan:
    """Estimate what each mesh's fullest rank holds. Allocates nothing and reads no weights.

    `known` caches estimates of the same tables, and is added to. Raises ConfigError if `asked.gpus` fits several
    meshes. What a backend cannot estimate is reported with its role.
    """
    tables = [
        (dotted(path), table)
        for path, table in tables_of(config)
        if isinstance(table, ModelConfig) and _is_read(config, table)
    ]
    meshes = meshes_of(run, sorted({table.mesh for _, table in tables}), asked.gpus)
    rows = _Rows.of(config, asked)
    planned: list[RankMemory] = []
    for name, mesh in meshes.items():
        has_gpu = mesh.gpus > 0
        gib = asked.gib or mesh.gib or (_A_GPU if has_gpu else None)
        here = [(role, table) for role, table in tables if table.mesh == name]
        held: list[Held] = []
        for role, table in here:
            work = rows.work(table, mesh, gib if has_gpu else None)
            key = f"{role} {table!r} {work!r}"
            held.append((known or {}).get(key) or _held(role, table, work))
            if known is not None:
                known[key] = held[-1]
        trains = any(isinstance(table, PolicyConfig) for _, table in here)
        overlaps = trains and int(getattr(config, "ahead", 0)) > 0
        beside = [_CONTEXT] if has_gpu else []
        axes = dict(mesh.axes) or {"dp": mesh.ranks}
        planned.append(RankMemory(name, mesh.ranks, axes, has_gpu, gib, held, beside, overlaps))
    return MemoryPlan(planned, rows.assumed)


def meshes_of(run: RunConfig, named: Sequence[str], gpus: int | None) -> dict[str, MeshConfig]:
    """Return the meshes that roles name. With `gpus`, the only mesh gets this number of ranks with one GPU each."""
    meshes = {name: run.meshes.get(name, MeshConfig()) for name in named}
    if gpus is None:
        return meshes
    if len(meshes) != 1:
        told = " ".join(f"run.meshes.{name}.ranks=N" for name in meshes)
        raise ConfigError(
            f"--gpus {gpus}: the roles are on {len(meshes)} meshes ({', '.join(meshes)}): set the number of each with "
            f"{told} instead"
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
    found: list[str] = []
    for each in plan_memory(config, run).meshes:
        if each.gib is None:
            continue
        said = run.meshes[each.mesh].gib is not None
        _, call = each.peak(host=not each.has_gpu)
        told = f"run.meshes.{each.mesh}: a rank needs about {each.needed / GIB:.1f} GiB{f' in {call}' if call else ''}"
        look = "`meshrl memory` shows what needs it, and what would save memory"
        if each.headroom is not None and each.headroom < 0:
            has = f"has gib = {each.gib:g}" if said else f"is taken to have {each.gib:g}, because no gib is set"
            found.append(f"{told}, and {has}: {look}")
        elif said and each.headroom is None:
            found.append(f"{told}, without that of {', '.join(each.unknown)}, which is unknown: {_why(each)}")
        elif said and (each.headroom or 0) < _TIGHT * each.gib * GIB:
            found.append(f"{told}, which leaves less than a twentieth of gib = {each.gib:g}: {look}")
    return found


def _why(mesh: RankMemory) -> str:
    return "; ".join(dict.fromkeys(held.unknown for held in mesh.roles if held.memory is None))


def savings_of(plan: MemoryPlan, asked: Asked, plan_with: Callable[[Sequence[str], Asked], MemoryPlan]) -> list[Saving]:
    """Return what each setting that a backend names would save, and what more ranks would, the most first.

    `plan_with` plans the configuration with further settings. Settings that it refuses are left out.
    """
    found: list[Saving] = []
    for mesh in plan.meshes:
        tried: list[tuple[str, Sequence[str], Asked]] = []
        for held in mesh.roles:
            for knob in held.memory.knobs if held.memory else ():
                setting = f"{held.role}.{knob}"
                tried.append((setting, [setting], asked))
        if asked.gpus:
            more = 2 * asked.gpus
            tried.append((f"--gpus {more}", [], Asked(more, asked.gib, asked.prompt, asked.completion)))
        else:
            tried += [(" ".join(settings), settings, asked) for settings in _other_shapes(mesh)]
        for setting, settings, with_these in tried:
            try:
                other = plan_with(settings, with_these)
            except MeshrlError:
                continue
            then = next(each for each in other.meshes if each.mesh == mesh.mesh)
            if then.unknown == mesh.unknown and then.needed < mesh.needed:
                found.append(Saving(setting, mesh.mesh, mesh.needed - then.needed))
    return sorted(found, key=lambda saving: -saving.nbytes)


def _other_shapes(mesh: RankMemory) -> Iterator[Sequence[str]]:
    """Yield shapes with twice the ranks, and with matrices split over two of them."""
    at, dp = f"run.meshes.{mesh.mesh}", mesh.axes.get("dp", 1)
    explicit = mesh.axes != {"dp": mesh.ranks}
    yield [f"{at}.ranks={2 * mesh.ranks}", *([f"{at}.axes.dp={2 * dp}"] if explicit else [])]
    if dp % 2 == 0:
        yield [f"{at}.axes.dp={dp // 2}", f"{at}.axes.tp={2 * mesh.axes.get('tp', 1)}"]


def _is_read(config: Config, table: ModelConfig) -> bool:
    """True if the table is a role's with a model that the algorithm reads."""
    if not table.role or models_of(table.backend) in ("none", "ignored"):
        return False
    return type(table) is not ReferenceConfig or reads_reference(config)


def _held(role: str, table: ModelConfig, work: Work) -> Held:
    try:
        memory = memory_of(table, work)
    except MeshrlError as error:
        return Held(role, table.backend, None, str(error), isinstance(error, ConfigError))
    except Exception as error:  # noqa: BLE001 -- an estimate must not end a run: a model's code may do anything in a rehearsal
        return Held(role, table.backend, None, f"its rehearsal failed: {described(error)}")
    if memory is None:
        return Held(role, table.backend, None, f"the backend {table.backend!r} does not report it")
    return Held(role, table.backend, memory)


@dataclass(frozen=True)
class _Rows:
    """The rows that the configured roles process."""

    prompt: int
    completion: int
    drawn: int
    """Rows in a step."""
    updated: int
    """Rows in an update."""
    n: int
    assumed: list[str]

    @classmethod
    def of(cls, config: Config, asked: Asked) -> "_Rows":
        task, sampling = getattr(config, "task", None), getattr(config, "sampling", None)
        assumed: list[str] = []
        prompt = asked.prompt or (task.max_prompt_tokens if isinstance(task, TaskConfig) else None)
        if prompt is None:
            prompt = _PROMPT
            assumed.append(f"prompts of {prompt} tokens: change it with task.max_prompt_tokens or --prompt")
        completion = asked.completion or (sampling.max_tokens if isinstance(sampling, Sampling) else None)
        if completion is None:
            completion = _COMPLETION
            assumed.append(f"completions of {completion} tokens: change it with --completion")
        n = int(getattr(sampling, "n", 1))
        rows = int(getattr(config, "prompts", None) or getattr(config, "rows", None) or 1) * n
        return cls(prompt, completion, rows, -(-rows // int(getattr(config, "minibatches", 1))), n, assumed)

    def work(self, table: ModelConfig, mesh: MeshConfig, gib: float | None) -> Work:
        """Return the work of a role."""
        longest = longest_of(table.model) or self.prompt + self.completion
        completion = min(self.completion, longest - 1)
        rows = self.drawn if isinstance(table, SamplerConfig) else self.updated
        return Work(
            axes=dict(table.axes) or dict(mesh.axes) or {"dp": mesh.ranks},
            prompt=min(self.prompt, longest - completion),
            completion=completion,
            rows=rows,
            n=self.n,
            gpu=int((gib or 0) * GIB * min(1.0, mesh.gpus or 1.0)),
        )
