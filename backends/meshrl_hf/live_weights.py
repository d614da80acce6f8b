"""Weights that a policy's ranks broadcast from their shards, bucket by bucket: the reading side."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import count, zip_longest
from math import prod
from secrets import token_hex
from threading import Lock
from typing import Final, NamedTuple, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from meshrl import log
from meshrl.errors import DataError, DataLost, ModelError
from meshrl.mesh import Put, Rows, current_rank
from meshrl.roles import PolicyConfig
from meshrl.weights import Bucket, Probe, Weights
from meshrl_hf.boxes import Box
from meshrl_hf.broadcast import (
    IN_FLIGHT,
    Asked,
    Groups,
    Layout,
    Part,
    Passing,
    Sender,
    Staging,
    ask,
    connect,
    copied,
    view,
)
from meshrl_hf.trainable import Trainable
from meshrl_hf.transfer import Form, array_of, check_forms

_ATTEMPTS: Final = 2
"""Attempts of a pass. It fails for all readers if one dies, and the others ask again."""
_LOOK: Final = timedelta(seconds=1)
"""Time between two checks whether the weights are still offered."""
_ANSWER: Final = 600.0
"""Seconds within which the policy's first rank must say who reads together."""


class Source(NamedTuple):
    """The parts that one rank of the policy sends."""

    rank: int
    layouts: tuple[Layout, ...]


class Offer(NamedTuple):
    """An offer of weights, valid until the policy changes them."""

    place: str
    """HOST:PORT where the policy's ranks met."""
    key: str
    dtype: str
    """The name of the dtype in numpy."""
    sources: tuple[Source, ...]

    @property
    def forms(self) -> Mapping[str, Form]:
        """The forms of the whole tensors."""
        return {part.name: Form(self.dtype, part.size) for part in self._parts()}

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return sum(prod(part.shape) for part in self._parts()) * itemsize

    def buckets(self) -> list[tuple[int, Layout]]:
        """All buckets with the number of their sender, in the order for every reader, in which senders take turns."""
        rounds = zip_longest(*([(source.rank, layout) for layout in source.layouts] for source in self.sources))
        return [each for turn in rounds for each in turn if each is not None]

    def _parts(self) -> Iterator[Part]:
        return (part for source in self.sources for layout in source.layouts for part in layout.parts)


class LiveWeights(Weights):
    """Weights that stay where the policy trains them. Each reader receives them on first use.

    They are available until the policy's next update, and later readers get `DataLost`. A reader either pours them into
    its tensors, which takes two buckets of memory, or reads them whole like any others.
    """

    _offer: Offer
    _together: int
    """Number of ranks that read together."""
    _library: str
    """The library that carried them. Empty until they have arrived."""
    _whole: Sequence[Bucket] | None
    """All tensors, after the first use."""

    @classmethod
    def offered(cls, version: int, probe: Probe | None, offer: Offer, together: int = 1) -> Self:
        """Make weights from an offer. `together`: number of ranks that read them at once."""
        self = cls.of(version, (), probe)
        self._offer, self._together, self._library, self._whole = offer, together, "", None
        return self

    @classmethod
    def join(cls, parts: Sequence[Weights], plan: Sequence[Rows] | None = None) -> Self:  # noqa: ARG003 -- of no rows
        """Join the parts of all ranks. DataError if versions differ."""
        live = cast("Sequence[LiveWeights]", parts)
        versions = [part.version for part in live]
        if len(set(versions)) > 1:
            raise DataError(f"the ranks have weights of the versions {versions}: they made different updates")
        offers = [part._offer for part in live]  # noqa: SLF001 -- of this class
        sources = tuple(source for offer in offers for source in offer.sources)
        return cls.offered(versions[0], live[0].probe, offers[0]._replace(sources=sources))

    def read_by(self, together: int) -> Self:
        """Return the same weights for `together` ranks that receive each byte at once."""
        return self.offered(self.version, self.probe, self._offer, together)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The whole tensors, received on first use. DataLost if they are no longer available."""
        if self._whole is None:
            dtype = getattr(torch, self._offer.dtype)
            made = {name: torch.empty(form.shape, dtype=dtype) for name, form in self._offer.forms.items()}
            self._pour(made)
            arrays = {name: array_of(tensor) for name, tensor in made.items()}
            self._whole = Weights(self.version, arrays).buckets
        return self._whole

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return self._offer.nbytes

    @property
    def ways(self) -> frozenset[str]:
        """The transport, and its library once they have arrived."""
        return frozenset((f"broadcast by {self._library}" if self._library else "broadcast",))

    @property
    def lasts(self) -> bool:
        """False: they are gone with the policy's next update."""
        return False

    async def load(self) -> Self:
        """Return the same weights, which are received on use."""
        return self

    def hold(self, put: Put, limit: int, shares: bool = False) -> Self:
        """Return the same weights, which stay in the policy."""
        return self

    def with_version(self, version: int) -> Self:
        """Return the same tensors with another version."""
        return self.offered(version, self.probe, self._offer, self._together)

    def pour(self, tensors: Mapping[str, Tensor], begin: Callable[[], None]) -> None:
        """Copy all into a model's tensors, bucket by bucket. Calls `begin` before the first write.

        Raises ModelError, and copies nothing, if they belong to another model. Later errors leave some tensors old:
        ModelError if a bucket differs from the sent bytes, DataLost if some never arrive.
        """
        own = {name: Form(array_of(tensor).dtype.name, tuple(tensor.shape)) for name, tensor in tensors.items()}
        check_forms(own, self._offer.forms, self.version)
        self._pour(tensors, begin)

    def _pour(self, tensors: Mapping[str, Tensor], begin: Callable[[], None] = lambda: None) -> None:
        failed = ""
        with _reading:
            for attempt in range(_ATTEMPTS):
                try:
                    with torch.no_grad():
                        self._attempt(tensors, begin)
                    break
                except RuntimeError as error:
                    failed = str(error).partition("\n")[0]
                    log.warning("weights arrived incomplete", version=self.version, attempt=attempt, error=failed)
                    _stores.pop(self._offer.place, None)
            else:
                raise DataLost(f"{len(self._offer.sources)} ranks of the policy", failed, self._what)

    def _attempt(self, tensors: Mapping[str, Tensor], begin: Callable[[], None]) -> None:
        store = _stores.get(self._offer.place) or _stores.setdefault(self._offer.place, connect(self._offer.place))
        own = next(iter(tensors.values())).device
        passing, me = self._ask(store, own)
        begin()
        device = passing.device(own)
        dtype: torch.dtype = getattr(torch, self._offer.dtype)
        buckets = self._offer.buckets()
        buffers = _staging.get((layout for _, layout in buckets), device)
        under_way: deque[dist.Work] = deque()
        number = passing.members.index(me) + 1
        try:
            for index in range(len(buckets) + IN_FLIGHT):
                if index >= IN_FLIGHT:
                    under_way.popleft().wait()
                    _, layout = buckets[index - IN_FLIGHT]
                    self._take(buffers[index % IN_FLIGHT], layout, dtype, tensors)
                if index < len(buckets):
                    rank, layout = buckets[index]
                    group = _groups.get(store, passing, rank, number, device)
                    under_way.append(group.broadcast(buffers[index % IN_FLIGHT][: layout.nbytes]))
        except BaseException:
            _groups.drop(passing.group)
            raise
        self._library = "NCCL" if passing.on_gpus else "gloo"

    def _ask(self, store: Store, own: torch.device) -> tuple[Passing, str]:
        """Ask who reads together, for a process with tensors on `own`. Returns that, and this process's name."""
        key, token = self._offer.key, f"{_me()}/{next(_asked)}"
        ask(store, key, json.dumps(Asked(token, self._together, _groups.whole, own.type == "cuda")))
        end = time.monotonic() + _ANSWER
        while time.monotonic() < end:
            gone = store.check([f"{key}/gone"])
            try:
                store.wait([f"{key}/told/{token}"], timedelta(milliseconds=1) if gone else _LOOK)
            except dist.DistStoreError:
                if gone:
                    reason = "the policy has been updated since, and keeps no older ones: publish again"
                    raise DataLost("the policy's ranks", reason, self._what) from None
            else:
                return Passing(*json.loads(store.get(f"{key}/told/{token}"))), _me()
        raise DataLost("the policy's ranks", f"its first rank has not answered for {_ANSWER:g} s", self._what)

    def _take(self, buffer: Tensor, layout: Layout, dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> None:
        """Copy a bucket's parts to their places. ModelError if one then differs from what was sent."""
        told = buffer[layout.end : layout.nbytes].cpu().numpy().view(np.uint64).tolist()
        made: list[int] = []
        for part in layout.parts:
            place = tensors[part.name].detach()
            for dim, (start, length) in enumerate(zip(part.offsets, part.shape, strict=True)):
                place = place.narrow(dim, start, length)
            made.append(copied(place, view(buffer, part, dtype)))
        if damaged := [part.name for part, one, two in zip(layout.parts, made, told, strict=True) if one != two]:
            raise ModelError(
                f"weights of version {self.version} did not arrive as they were sent: {len(damaged)} tensors differ "
                f"({', '.join(damaged[:3])}). Publish them again"
            )

    @property
    def _what(self) -> str:
        return f"the weights of version {self.version}"

    def __reduce__(self) -> tuple[Callable[..., "LiveWeights"], tuple[object, ...]]:
        return _received, (self.version, self.probe, self._offer, self._together)

    def __repr__(self) -> str:
        return f"LiveWeights(version {self.version}, {self.nbytes:,} bytes in the policy)"


_reading: Final = Lock()
"""One actor of this process reads at a time, because its groups identify the process."""
_groups: Final = Groups()
_staging: Final = Staging()
_stores: Final[dict[str, Store]] = {}
"""By place."""
_asked: Final = count()
_own: Final = token_hex(8)


def _me() -> str:
    """Return the name of this process in groups. It changes after a fork."""
    return f"{_own}-{os.getpid()}"


def sender(config: PolicyConfig, trainable: Trainable) -> Sender:
    """Make the sender of a policy's rank. All ranks make theirs together."""
    passes = trainable.passes
    dtype: torch.dtype = getattr(torch, config.dtype)
    return Sender(passes.ranks, current_rank(), passes.model.device, dtype, config.bucket_mib << 20)


def offered(sender: Sender, version: int, probe: Probe | None, shards: Iterable[Box]) -> LiveWeights:
    """Offer a rank's shards to readers."""
    key, layouts = sender.offer(shards)
    source = Source(sender.number, layouts)
    return LiveWeights.offered(version, probe, Offer(sender.place, key, sender.dtype, (source,)))


def _received(version: int, probe: Probe | None, offer: Offer, together: int) -> LiveWeights:
    return LiveWeights.offered(version, probe, offer, together)
