"""The process group of a rank's process, and the ranks that compute one model together."""

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Final, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from meshrl import log
from meshrl.errors import ConfigError, Damaged, DataError, MeshrlError, ModelError
from meshrl.mesh import PATIENCE, Rank, current_rank, machine_gpus
from meshrl_torch.ranks.rank_monitor import RankMonitor
from meshrl_torch.wire import nccl, segments
from meshrl_torch.wire.plan import gpu_of

T = TypeVar("T")

_LONGEST_WAIT: Final = timedelta(minutes=30)
"""Longest time that a rank waits for another."""

_stores: Final[dict[str, Store]] = {}
"""By address. Kept, because the first rank serves its store to the others."""


def own_device() -> torch.device:
    """Return the device that this rank computes on: its GPU, if it has one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def own_rank() -> Rank:
    """Return this rank, after setting torch's number of threads."""
    rank = current_rank()
    torch.set_num_threads(rank.threads)
    return rank


def are_processes(rank: Rank) -> bool:
    """True if each rank of the mesh is a process, not a thread of this one."""
    return os.environ.get("WORLD_SIZE") == str(rank.size)


def store_address() -> str:
    """Return the address of the mesh's store, as host and port. It changes after a process of the mesh restarted."""
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def patience_with_hosts() -> float:
    """Return the seconds after which a host that does not answer is given up: `run.patience`."""
    return float(os.environ.get("MESHRL_PATIENCE", PATIENCE))


def mesh_store(rank: Rank) -> Store:
    """Return the store of the mesh. All ranks call it together."""
    address = store_address()
    if address not in _stores:
        _stores[address], _, _ = next(rendezvous(f"tcp://{address}", rank.index, rank.size, timeout=_LONGEST_WAIT))
    return _stores[address]


class _Joined(NamedTuple):
    """The default group of this process."""

    address: str
    """HOST:PORT of its ranks' store."""
    generation: str
    """The address when the group was made."""
    monitor: RankMonitor


_joined: _Joined | None = None
_first: Final = Lock()
"""Guards the default group of a mesh of one rank, because the local engine's roles are threads of one process."""


class SharedGroups(Generic[T]):
    """Process groups, made once in a process for each key: they use threads, and are never freed.

    If the default group was made again, groups made from the old one are forgotten.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, T] = {}
        self._world: dist.ProcessGroup | None = None
        """The default group that they belong to."""
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make` for this key, called once. All ranks ask for the same keys in the same order."""
        with self._lock:
            if self._world is not dist.group.WORLD:
                self._made.clear()
                self._world = dist.group.WORLD
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]


def join(rank: Rank, device: torch.device, backend: str) -> None:
    """Make the process group of the mesh, unless this process is in it. All ranks call it together.

    ConfigError, which names the `backend`, if ranks of a mesh share a process. ConfigError if ranks compute on devices
    of different types, on one GPU, with different releases of NCCL, or on CPUs though their mesh has GPUs.
    """
    global _joined  # noqa: PLW0603 - torch has one default group for each process
    lacks = _why_no_gpu(rank.gpus) if rank.gpus and device.type != "cuda" else ""
    if rank.size == 1:
        if lacks:
            raise ConfigError(lacks)
        with _first:
            if not dist.is_initialized():
                own = cast("Callable[[], Store]", vars(dist)["HashStore"])  # public, but not in torch's type stubs
                _make_group(device, own(), rank)
        return
    if not are_processes(rank):
        raise ConfigError(
            f"the backend '{backend}' needs a process for each of {rank.size} ranks, but ranks of the local engine "
            "are threads: set run.engine = 'processes', or use a mesh of one rank"
        )
    address = store_address()
    if _joined is not None and _joined.address == address:
        return
    store = mesh_store(rank)
    kind, gpu = (f"cuda with NCCL {nccl.release()}", gpu_of(device)) if device.type == "cuda" else (device.type, "")
    _check_devices(_exchanged(store, rank, "device", f"{kind}:{gpu}:{lacks}"))
    known = set(_exchanged(store, rank, "generation", _joined.generation if _joined else ""))
    if "" in known or len(known) > 1:  # a process is new, and the old group lacks it
        if _joined is not None:
            _joined.monitor.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        _make_group(device, PrefixStore("group", store), rank)
        lost = partial(_end_collectives, device, dist.group.WORLD)
        monitor = RankMonitor(store, rank, address.rpartition(":")[0], lost, patience_with_hosts())
        _joined = _Joined(address, address, monitor)
    elif _joined is not None:
        _joined = _joined._replace(address=address)


def _end_collectives(device: torch.device, world: dist.ProcessGroup | None, gone: int, silent: bool) -> None:
    """End collectives of the default group `world` after a rank was lost. gloo ends by itself if a process has ended.

    Nothing ends gloo's wait for a silent host but the end of this process, which the controller sees as its death.
    """
    if dist.group.WORLD is not world:
        return
    if silent:
        log.warning(
            f"this rank ends, because rank {gone} of its mesh cannot be reached: nothing was heard of its host for "
            f"{patience_with_hosts():g} s, which is run.patience: the host or the network between the two is down"
        )
        os._exit(1)
    if device.type == "cuda":
        log.info("a rank has gone, and collectives are ended", rank=gone)
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - torch's only way to end them in one order


def _exchanged(store: Store, rank: Rank, name: str, own: str) -> list[str]:
    """Return what each rank tells under a name, such as the group that its process is in: empty for one in none."""
    store.set(f"{name}/{rank.index}", own)
    return [store.get(f"{name}/{index}").decode() for index in range(rank.size)]


def _check_devices(devices: Sequence[str]) -> None:
    """Raise ConfigError on all ranks before they would wait for each other. `devices`: kind, GPU and complaint."""
    owners: dict[str, int] = {}
    for index, text in enumerate(devices):
        kind, gpu, lacks = text.split(":", 2)
        if lacks:
            raise ConfigError(f"rank {index}: {lacks}")
        if kind != (first := devices[0].partition(":")[0]):
            alike = first.startswith("cuda") and kind.startswith("cuda")
            gpus = "" if alike else "give the mesh gpus = 1, so that each rank has a GPU, and "
            raise ConfigError(
                f"rank 0 computes on {first} and rank {index} on {kind}: {gpus}install the same build of torch for all"
            )
        if gpu and (owner := owners.setdefault(gpu, index)) != index:
            raise ConfigError(
                f"the ranks {owner} and {index} share the GPU {gpu}, and NCCL takes one rank on each: give the mesh "
                "gpus = 1, or 1 rank"
            )


def _why_no_gpu(gpus: float) -> str:
    """Say why torch finds no GPU on a rank that is to have some."""
    found, built = machine_gpus(), torch.version.cuda
    wheel = f"its wheel is for CUDA {built}" if built else "its wheel is for CPUs alone"
    driver = f"the driver supports CUDA up to {found.driver}" if found.driver else "no driver answers"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = "is not set" if visible is None else f"is {visible!r}"
    return (
        f"the mesh has gpus = {gpus:g}, but torch {torch.__version__} finds no GPU: {wheel}, {driver}, the machine has "
        f"{found.count}, and CUDA_VISIBLE_DEVICES {names}. Install a torch wheel for the driver's CUDA, or a newer "
        "driver; without GPUs, set gpus = 0"
    )


def _make_group(device: torch.device, store: Store, rank: Rank) -> None:
    """Make the default group. With NCCL, gloo carries what ranks agree on."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        nccl.set_alike()
        segments.expand()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank.index,
        world_size=rank.size,
        timeout=_LONGEST_WAIT,
        device_id=device if on_gpu else None,  # so NCCL need not guess it, or wait for the first collective to connect
    )


class Share(NamedTuple):
    """A rank's contribution to a call, or that of all: sums, but the maximum of `passes`."""

    passes: int
    """Forward passes."""
    tokens: int = 0
    """Learned tokens."""
    rows: int = 0
    """Rows with learned tokens."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of torch's default group, each a process. The backend adds the layout of their computations."""

    size: int
    """Number of ranks with different rows."""
    place: tuple[int, ...]
    """This rank's number among these. Ranks with the same number have the same rows."""
    interruptible = False
    """True if a call may end between two passes. False if ranks wait for each other."""

    @property
    def number(self) -> int:
        """This rank's number among all."""
        return dist.get_rank()

    @property
    def last(self) -> int:
        """The rank that computes the loss of this one's rows: itself, or the end of its pipeline."""
        return self.number

    def total(self, share: Callable[[], Share]) -> Share:
        """Combine the shares of all ranks. An error of one rank is raised on all."""
        return self.totals(lambda: {"": share()})[""]

    def totals(self, shares: Callable[[], Mapping[str, Share]]) -> Mapping[str, Share]:
        """Combine the shares of all ranks by name. A rank may lack a name. An error of one rank is raised on all."""
        different = dict(self.agree(lambda: (self.place, shares()))).values()
        combined: dict[str, Share] = {}
        for name in sorted({name for each in different for name in each}):
            passes, tokens, rows = zip(*(each[name] for each in different if name in each), strict=True)
            combined[name] = Share(max(passes), sum(tokens), sum(rows))
        return combined

    def first(self, work: Callable[[], None]) -> None:
        """Run `work` on one rank, while the others wait. An error is raised on all."""
        self.agree(work if self.number == 0 else lambda: None)

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on each rank and return the results of all. An error of one rank is raised on all.

        So no rank waits in a collective for one that has left.
        """
        if dist.get_world_size() == 1:
            return [work()]
        failure: Exception | None = None
        outcome: T | Failed
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 -- it is raised after the others know of it
            failure, outcome = error, Failed.of(error)
        outcomes: list[T | Failed] = [outcome] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        if failure is not None:
            raise failure
        for rank, each in enumerate(outcomes):
            if isinstance(each, Failed):
                raise each.kind(f"{each.text} (on rank {rank})")
        return cast("list[T]", outcomes)

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on each rank and return this rank's result, which is not sent. An error is raised on all."""
        results: list[T] = []
        self.agree(lambda: results.append(work()))
        return results[0]


@dataclass(frozen=True)
class SingleRank(RankGroup):
    """A single rank, which needs no process group."""

    size: int = 1
    place: tuple[int, ...] = ()
    interruptible = True

    @property
    def number(self) -> int:
        """Its number, the only one."""
        return 0

    def agree(self, work: Callable[[], T]) -> list[T]:
        """Return its own result."""
        return [work()]


SINGLE_RANK: Final = SingleRank()


class Failed(NamedTuple):
    """An exception as the other ranks receive it."""

    kind: type[MeshrlError]
    text: str

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """Convert an exception. A plain error of meshrl keeps its class."""
        if type(error) in (ConfigError, Damaged, DataError, ModelError):
            return cls(cast("type[MeshrlError]", type(error)), str(error))
        return cls(ModelError, f"{type(error).__name__}: {error}")
