"""Buckets sent in process groups: each sender is the root of a group, whose other members are ranks that read."""

import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Final, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from meshrl_torch.wire import nccl
from meshrl_torch.wire.bucket_bytes import aligned
from meshrl_torch.wire.bucket_server import Slots
from meshrl_torch.wire.plan import CPU, STUCK, BroadcastPlan

IN_FLIGHT: Final = 6
"""Most buckets in flight."""
_POLL: Final = 0.0005
"""Seconds between two looks at a bucket on its way by NCCL."""
KEPT: Final = 4
"""Number of sets of readers whose groups are kept, newest last: for example a sampler's and a reference's."""


class Group(Protocol):
    """A sender, which is its first member, and its readers. The methods that torch's types lack."""

    def broadcast(self, tensor: Tensor, root: int) -> dist.Work:
        """Start to send the root's tensor to all members."""
        ...

    def abort(self) -> None:
        """Abort running collectives. NCCL's end with an error. Gloo's end when the group is freed, or after `STUCK`."""
        ...


def _make_group(store: Store, number: int, size: int, device: torch.device) -> Group:
    """Make a group of NCCL if all have their tensors on GPUs, else of gloo.

    All members call it together. RuntimeError if one is missing.
    """
    if device.type != "cuda":
        return cast("Group", dist.ProcessGroupGloo(store, number, size, STUCK))
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 -- missing if torch has no CUDA

    nccl.set_alike()
    options = ProcessGroupNCCL.Options()
    # After this time torch ends the process. `_wait` gives up before, and the group is aborted.
    options._timeout = 3 * STUCK  # noqa: SLF001 -- torch sets it this way, and offers no other
    return cast("Group", ProcessGroupNCCL(store, number, size, options))


class Groups:
    """The groups of this process, by set of readers, newest last. A reader is in one group with each sender."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, Group]] = {}

    @property
    def names(self) -> list[str]:
        """The names of groups that have not failed, at most as many as are kept."""
        return list(self._groups)

    def keep_only(self, names: Collection[str]) -> None:
        """Drop groups of other names."""
        for name in self._groups.keys() - names:
            self.drop(name)

    def of(self, plan: BroadcastPlan) -> dict[int, Group]:
        """Return the groups of a set of readers by sender. The oldest set is dropped if there are too many."""
        if plan.group not in self._groups:
            while len(self._groups) >= KEPT:
                self.drop(next(iter(self._groups)))
            self._groups[plan.group] = {}
        return self._groups[plan.group]

    def get(self, store: Store, plan: BroadcastPlan, sender: int, me: str, device: torch.device) -> Group:
        """Return the group with a sender, made if new. `me`: this process's token, or its number as a sender."""
        groups = self.of(plan)
        if sender not in groups:
            members = [str(sender), *plan.members(sender)]
            prefixed = PrefixStore(f"{plan.group}/{sender}", store)
            groups[sender] = _make_group(prefixed, members.index(me), len(members), device)
        return groups[sender]

    def drop(self, name: str) -> None:
        """Drop groups that failed or are no longer needed."""
        for group in self._groups.pop(name, {}).values():
            group.abort()


def _wait(work: dist.Work, device: torch.device) -> None:
    """Wait for a collective. RuntimeError if a process has ended, or after `STUCK`.

    NCCL's `wait` returns at once, and only orders the stream. Nothing tells NCCL that a process of its group has ended.
    """
    work.wait()
    until = time.monotonic() + STUCK.total_seconds()
    while device.type == "cuda" and not work.is_completed():
        if time.monotonic() > until:
            raise RuntimeError(f"a broadcast by NCCL was stuck for {STUCK.total_seconds():g} s: a process has ended")
        time.sleep(_POLL)


def _nothing() -> None:
    pass


class _Transfer(NamedTuple):
    """A bucket in flight."""

    work: dist.Work | None
    arrived: Callable[[], None]
    done: Callable[[], None]


class InFlightBuckets:
    """The buckets in flight, oldest first, and memory to stage them.

    The memory is kept, because allocating it takes about as long as filling it.
    """

    def __init__(self) -> None:
        self._under_way: deque[_Transfer] = deque()
        self._arrived: deque[_Transfer] = deque()
        """Buckets that have arrived, and are not done."""
        self._slots: Slots | None = None
        self._largest, self._device, self._shared = 0, CPU, False
        self.slot = 0
        """The number of the last slot that was used."""

    def begin(self, largest: int, device: torch.device, *, shared: bool = False) -> None:
        """Prepare for buckets of at most `largest` bytes. `shared`: other processes open their memory."""
        largest = aligned(max(1, largest))
        if largest > self._largest or device != self._device or shared > self._shared:
            self._slots = None
            self._largest, self._device, self._shared = largest, device, shared

    @property
    def slots(self) -> Slots:
        """Memory for all buckets in flight, in one piece, because systems round each up to large pages."""
        if self._slots is None:
            self._slots = Slots(IN_FLIGHT, self._largest, self._device, shared=self._shared)
        return self._slots

    def memory(self, nbytes: int) -> Tensor:
        """Return memory for the next staged bucket, uint8[nbytes]. It is used again after `IN_FLIGHT` others."""
        self.slot = (self.slot + 1) % IN_FLIGHT
        return self.slots.tensor[self.slot, :nbytes]

    def add(
        self, work: dist.Work | None, done: Callable[[], None] = _nothing, arrived: Callable[[], None] | None = None
    ) -> None:
        """Add a bucket. `arrived` is called when it has arrived, and later `done`, before its memory is used again."""
        self._under_way.append(_Transfer(work, arrived or _nothing, done))
        if arrived and len(self._under_way) > IN_FLIGHT // 2:
            self._wait_for_oldest()
        if len(self._under_way) + len(self._arrived) == IN_FLIGHT:
            self._finish_oldest()

    def wait(self) -> None:
        """Wait until all have arrived."""
        while self._under_way:
            self._wait_for_oldest()

    def end(self) -> None:
        """Wait until all are done."""
        self.wait()
        while self._arrived:
            self._finish_oldest()

    def drop(self) -> None:
        """Forget all, after an error. Else they would keep the connections of their group open."""
        self._under_way.clear()
        self._arrived.clear()

    def _wait_for_oldest(self) -> None:
        oldest = self._under_way.popleft()
        if oldest.work:
            _wait(oldest.work, self._device)
        oldest.arrived()
        self._arrived.append(oldest)

    def _finish_oldest(self) -> None:
        if not self._arrived:
            self._wait_for_oldest()
        self._arrived.popleft().done()
