"""Weights that a policy's ranks broadcast out of their own shards, bucket by bucket: who reads them."""

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
"""A pass fails for all of its readers where one of them dies; who is left asks again."""
_LOOK: Final = timedelta(seconds=1)
"""Between two looks whether the weights are still to be had."""
_ANSWER: Final = 600.0
"""Seconds within which the policy's first rank says who reads together."""


class Source(NamedTuple):
    """What one rank of the policy sends."""

    rank: int
    layouts: tuple[Layout, ...]


class Offer(NamedTuple):
    """Where weights are to be had, until the policy changes them."""

    place: str
    """HOST:PORT at which the policy's ranks met."""
    key: str
    dtype: str
    """numpy's name."""
    sources: tuple[Source, ...]

    @property
    def forms(self) -> Mapping[str, Form]:
        """What the tensors are, whole."""
        return {part.name: Form(self.dtype, part.size) for part in self._parts()}

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return sum(prod(part.shape) for part in self._parts()) * itemsize

    def buckets(self) -> list[tuple[int, Layout]]:
        """All, each with its sender's number, in the order in which every reader takes them: the senders by turns."""
        rounds = zip_longest(*([(source.rank, layout) for layout in source.layouts] for source in self.sources))
        return [each for turn in rounds for each in turn if each is not None]

    def _parts(self) -> Iterator[Part]:
        return (part for source in self.sources for layout in source.layouts for part in layout.parts)


class LiveWeights(Weights):
    """Weights that stay where the policy trains them, and come to each reader when it first looks at them.

    They are to be had until the policy's next update; `DataLost` tells who comes later. A reader either pours them into
    tensors of its own, which takes two buckets of memory, or reads them as any others, whole.
    """

    _offer: Offer
    _together: int
    """How many ranks read at once."""
    _library: str
    """By which they came, once they have."""
    _whole: Sequence[Bucket] | None
    """All tensors, once somebody has looked at them."""

    @classmethod
    def offered(cls, version: int, probe: Probe | None, offer: Offer, together: int = 1) -> Self:
        """Weights that were offered. `together`: how many ranks read them at once."""
        self = cls.of(version, (), probe)
        self._offer, self._together, self._library, self._whole = offer, together, "", None
        return self

    @classmethod
    def join(cls, parts: Sequence[Weights], plan: Sequence[Rows] | None = None) -> Self:  # noqa: ARG003 -- of no rows
        """The parts of all ranks. DataError where versions differ."""
        live = cast("Sequence[LiveWeights]", parts)
        versions = [part.version for part in live]
        if len(set(versions)) > 1:
            raise DataError(f"the ranks have weights of the versions {versions}: they made different updates")
        offers = [part._offer for part in live]  # noqa: SLF001 -- of its own class
        sources = tuple(source for offer in offers for source in offer.sources)
        return cls.offered(versions[0], live[0].probe, offers[0]._replace(sources=sources))

    def read_by(self, together: int) -> Self:
        """The same, of which so many ranks are given each byte at once."""
        return self.offered(self.version, self.probe, self._offer, together)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The tensors, whole, which come when this is first asked for. DataLost where they are not to be had."""
        if self._whole is None:
            dtype = getattr(torch, self._offer.dtype)
            made = {name: torch.empty(form.shape, dtype=dtype) for name, form in self._offer.forms.items()}
            self._pour(made)
            arrays = {name: array_of(tensor) for name, tensor in made.items()}
            self._whole = Weights(self.version, arrays).buckets
        return self._whole

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._offer.nbytes

    @property
    def ways(self) -> frozenset[str]:
        """What carries them, and by which library they came."""
        return frozenset((f"broadcast by {self._library}" if self._library else "broadcast",))

    @property
    def lasts(self) -> bool:
        """No: they are gone with the policy's next update."""
        return False

    async def load(self) -> Self:
        """The same: they come when they are looked at."""
        return self

    def hold(self, put: Put, limit: int, shares: bool = False) -> Self:
        """The same: they lie in the policy."""
        return self

    def with_version(self, version: int) -> Self:
        """The same tensors under another version."""
        return self.offered(version, self.probe, self._offer, self._together)

    def pour(self, tensors: Mapping[str, Tensor], begin: Callable[[], None]) -> None:
        """Copy all into a model's tensors, bucket by bucket. `begin` is called before the first is written.

        ModelError, and nothing copied, if they are not of this model. After that ModelError where a bucket has not the
        bytes that were sent, and DataLost where some do not come: then some tensors are new and others old.
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
        """Who reads together, and which of these this process is, whose tensors are on a device."""
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
        """Copy a bucket's parts to where they belong. ModelError where one is then not as it was sent."""
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
"""One actor of this process reads at a time: its groups know the process."""
_groups: Final = Groups()
_staging: Final = Staging()
_stores: Final[dict[str, Store]] = {}
"""By place."""
_asked: Final = count()
_own: Final = token_hex(8)


def _me() -> str:
    """What the groups know this process as; another one after a fork."""
    return f"{_own}-{os.getpid()}"


def sender(config: PolicyConfig, trainable: Trainable) -> Sender:
    """What a rank of a policy sends with; all of them make it at the same time."""
    passes = trainable.passes
    dtype: torch.dtype = getattr(torch, config.dtype)
    return Sender(passes.ranks, current_rank(), passes.model.device, dtype, config.bucket_mib << 20)


def offered(sender: Sender, version: int, probe: Probe | None, shards: Iterable[Box]) -> LiveWeights:
    """A rank's shards, as readers are told of them."""
    key, layouts = sender.offer(shards)
    source = Source(sender.number, layouts)
    return LiveWeights.offered(version, probe, Offer(sender.place, key, sender.dtype, (source,)))


def _received(version: int, probe: Probe | None, offer: Offer, together: int) -> LiveWeights:
    return LiveWeights.offered(version, probe, offer, together)
