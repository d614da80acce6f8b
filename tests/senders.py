"""A policy's ranks that broadcast weights, each from a thread of this process."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import pytest
import torch
import torch.distributed as dist

from meshrl.data import Probe
from meshrl.mesh import Rank
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.weights import sender as broadcast
from meshrl_torch.weights.live_weights import LiveWeights, offer_weights
from meshrl_torch.weights.sender import Sender

if TYPE_CHECKING:
    from meshrl_torch.ranks.process_group import RankGroup

T = TypeVar("T")


class AgreeingRanks:
    """Ranks of which each gets the result of the first."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._agreed = ranks, list[object]()

    def agree(self, say: Callable[[], T]) -> list[T]:
        self._agreed = self._agreed or [say()] * self._ranks
        return cast("list[T]", self._agreed)


class Senders(NamedTuple):
    each: Sequence[Sender]

    def offer(self, tensors: Mapping[str, torch.Tensor], version: int, probe: Probe | None = None) -> LiveWeights:
        boxes: list[list[Box]] = [[] for _ in self.each]
        for name, tensor in tensors.items():
            first = 0
            for own, rows in zip(boxes, tensor.tensor_split(len(self.each)), strict=True):
                if len(rows):
                    own.append(Box(name, tuple(tensor.shape), (first, *[0] * (tensor.dim() - 1)), rows))
                    first += len(rows)
        parts = [offer_weights(sender, version, probe, own) for sender, own in zip(self.each, boxes, strict=True)]
        return LiveWeights.join(parts)

    def end(self) -> None:
        for sender in self.each:
            sender.end()


@contextmanager
def sending(ranks: int, limit: int, matrices: Collection[str] = frozenset()) -> Generator[Senders]:
    """Make ranks with `2 * limit` bytes of memory for buckets. `matrices`: sent in FP8."""
    store = cast("Any", dist).TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "are_processes", lambda _: True)
        patch.setattr(broadcast, "mesh_store", lambda _: store)
        patch.setattr(broadcast, "store_address", lambda: f"127.0.0.1:{store.port}")
        agreed, cpu = cast("RankGroup", AgreeingRanks(ranks)), torch.device("cpu")
        places = [Rank(index, ranks) for index in range(ranks)]
        made = Senders([Sender(agreed, place, cpu, torch.float32, limit, matrices) for place in places])
    yield made
    made.end()
