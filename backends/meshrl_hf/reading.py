"""Read weights that a policy's ranks broadcast, bucket by bucket. Engines' processes read too. They have no meshrl."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from secrets import token_hex
from threading import Lock
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from meshrl_hf.collective import IN_FLIGHT, Asked, Groups, Passing, Staging, ask, comes, connect, view
from meshrl_hf.offer import Layout, Offer, Part

_ATTEMPTS: Final = 2
"""Attempts of a pass. It fails for all readers if one dies, and the others ask again."""
_LOOK: Final = 1.0
"""Time between two checks whether the weights are still offered."""
_ANSWER: Final = 600.0
"""Seconds within which the policy's first rank must say who reads together."""


class Lost(Exception):
    """Weights that did not arrive."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where, self.reason = where, reason


class Damaged(Exception):
    """Weights that differ from what was sent."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"{len(names)} tensors differ ({', '.join(names[:3])})")


class Model(Protocol):
    """Tensors that parts are copied to."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        ...

    def begin(self) -> None:
        """Get ready for all parts. Called again if they are sent again."""
        ...

    def take(self, part: Part, tensor: Tensor) -> Tensor:
        """Copy a part, whose memory is used again. Returns the fingerprint of the copied bytes, int64[]."""
        ...


class Reader:
    """The end of a process that reads. It keeps its groups and buckets from one version to the next."""

    def __init__(self) -> None:
        self._reading = Lock()
        """One actor of the process reads at a time, because its groups identify the process."""
        self._groups = Groups()
        self._staging = Staging()
        self._stores: dict[str, Store] = {}
        """By place."""
        self._asked = count()
        self._own = token_hex(8)

    def read(self, offer: Offer, together: int, model: Model, warn: Callable[[int, str], object]) -> str:
        """Receive all parts of an offer, like all of the `together` ranks that read it at once.

        Returns the library that carried them, NCCL or gloo. Calls `warn` with the number of each failed attempt and its
        error. Raises Lost if some never arrive, and Damaged if some differ from what was sent.
        """
        failed = ""
        with self._reading, torch.no_grad():
            for attempt in range(_ATTEMPTS):
                try:
                    return self._attempt(offer, together, model)
                except RuntimeError as error:
                    failed = str(error).partition("\n")[0]
                    warn(attempt, failed)
                    self._stores.pop(offer.place, None)
        raise Lost(f"{len(offer.sources)} ranks of the policy", failed)

    def _attempt(self, offer: Offer, together: int, model: Model) -> str:
        store = self._stores.get(offer.place) or self._stores.setdefault(offer.place, connect(offer.place))
        passing = self._ask(store, offer, Asked("", together, self._groups.whole, model.device.type == "cuda"))
        model.begin()
        device = passing.device(model.device)
        dtype: torch.dtype = getattr(torch, offer.dtype)
        buckets = offer.buckets()
        buffers = self._staging.get((layout for _, layout in buckets), device)
        under_way: deque[dist.Work] = deque()
        number = passing.members.index(self._me) + 1
        try:
            for index in range(len(buckets) + IN_FLIGHT):
                if index >= IN_FLIGHT:
                    under_way.popleft().wait()
                    _, layout = buckets[index - IN_FLIGHT]
                    self._take(buffers[index % IN_FLIGHT], layout, dtype, model)
                if index < len(buckets):
                    rank, layout = buckets[index]
                    group = self._groups.get(store, passing, rank, number, device)
                    under_way.append(group.broadcast(buffers[index % IN_FLIGHT][: layout.nbytes]))
        except BaseException:
            self._groups.drop(passing.group)
            raise
        return "NCCL" if passing.on_gpus else "gloo"

    def _ask(self, store: Store, offer: Offer, asked: Asked) -> Passing:
        """Ask who reads together."""
        key, token = offer.key, f"{self._me}/{next(self._asked)}"
        ask(store, key, json.dumps(asked._replace(token=token)))
        end = time.monotonic() + _ANSWER
        while time.monotonic() < end:
            gone = store.check([f"{key}/gone"])
            if comes(store, f"{key}/told/{token}", 0.0 if gone else time.monotonic() + _LOOK):
                return Passing(*json.loads(store.get(f"{key}/told/{token}")))
            if gone:
                reason = "the policy has been updated since, and keeps no older ones: publish again"
                raise Lost("the policy's ranks", reason)
        raise Lost("the policy's ranks", f"its first rank has not answered for {_ANSWER:g} s")

    def _take(self, buffer: Tensor, layout: Layout, dtype: torch.dtype, model: Model) -> None:
        """Copy a bucket's parts. Raises Damaged if one then differs from what was sent."""
        made = torch.stack([model.take(part, view(buffer, part, dtype)) for part in layout.parts])
        told = buffer[layout.end : layout.nbytes].view(torch.int64).to(made.device)
        differ: list[bool] = (made != told).tolist()
        if any(differ):
            raise Damaged([part.name for part, differs in zip(layout.parts, differ, strict=True) if differs])

    @property
    def _me(self) -> str:
        """The name of this process in groups. It changes after a fork."""
        return f"{self._own}-{os.getpid()}"
