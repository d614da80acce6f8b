"""Read weights that a policy's ranks broadcast, bucket by bucket. Engines' processes read too. They have no meshrl."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from secrets import token_hex
from threading import Lock
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from meshrl_torch.wire.collective import STUCK, Asked, Flight, Groups, Line, Passing, bytes_in_place, copy, view
from meshrl_torch.wire.fingerprints import fingerprint
from meshrl_torch.wire.handover import Unopened, open_slots
from meshrl_torch.wire.locality import Route, Where
from meshrl_torch.wire.manifest import Layout, Offer, Part

_ATTEMPTS: Final = 2
"""Attempts of a pass. It fails for all readers if one dies, and the others ask again."""
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
        """`names`: of the tensors in the buckets that differ."""
        super().__init__(f"tensors in damaged buckets: {len(names)} ({', '.join(names[:3])})")


class Model(Protocol):
    """Tensors that parts are written to."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        ...

    def begin(self) -> None:
        """Get ready for all parts. Called again if they are sent again."""
        ...

    def place(self, part: Part) -> Tensor:
        """Return the memory for a part. It is written until `arrived` is called."""
        ...

    def arrived(self, part: Part) -> None:
        """Note that a part is in its place."""
        ...


class _Pour:
    """One attempt to fill a model with an offer's parts, and the fingerprints of what came."""

    def __init__(self, offer: Offer, model: Model, device: torch.device) -> None:
        """`device`: of the buckets."""
        self.offer, self.device = offer, device
        self._model = model
        self._made: dict[int, list[Tensor]] = {source.rank: [] for source in offer.sources}
        """Fingerprints of buckets that came, by sender."""
        self._told: dict[int, Tensor] = {}
        """Fingerprints that the senders have sent, by sender."""

    def places(self, layout: Layout) -> Sequence[Tensor]:
        """Return the memory for a bucket's parts."""
        return [self._model.place(part) for part in layout.parts]

    def take(self, rank: int, layout: Layout, places: Sequence[Tensor], content: Tensor, *, in_place: bool) -> None:
        """Copy the parts of a sender's bucket to their places, unless they are there."""
        self._made[rank].append(fingerprint(content))
        for part, place in zip(layout.parts, places, strict=True):
            if not in_place:
                copy(place, view(content, part))
            self._model.arrived(part)

    def tell(self, rank: int, prints: Tensor) -> None:
        """Note what a sender says of its buckets, int64[buckets]. Read after all have arrived."""
        self._told[rank] = prints

    def check(self) -> None:
        """Raise Damaged if buckets differ from what was sent."""
        names: list[str] = []
        for source in self.offer.sources:
            if source.layouts:
                here = torch.stack(self._made[source.rank])
                differ: list[bool] = (here != self._told[source.rank].to(here.device)).tolist()
                layouts = [layout for layout, differs in zip(source.layouts, differ, strict=True) if differs]
                names += [part.name for layout in layouts for part in layout.parts]
        if names:
            raise Damaged(list(dict.fromkeys(names)))


class Reader:
    """The end of a process that reads. It keeps its groups and buckets from one version to the next."""

    def __init__(self) -> None:
        self._reading = Lock()
        """One actor of the process reads at a time, because its groups identify the process."""
        self._groups = Groups()
        self._flight = Flight()
        self._lines: dict[str, Line] = {}
        """By place."""
        self._closed: set[str] = set()
        """Places of policies whose memory could not be opened. Their buckets come in groups from then on."""
        self._asked = count()
        self._own = token_hex(8)

    def read(self, offer: Offer, together: int, model: Model, warn: Callable[[int, str], object]) -> str:
        """Receive all parts of an offer, like all of the `together` ranks that read it at once.

        Returns how they came, such as "by gloo". Calls `warn` with the number of each failed attempt and its
        error. Raises Lost if some never arrive, and Damaged if some differ from what was sent.
        """
        failed = ""
        with self._reading, torch.no_grad():
            for attempt in range(_ATTEMPTS):
                try:
                    return self._attempt(offer, together, model)
                except (RuntimeError, OSError) as error:
                    failed = str(error).partition("\n")[0]
                    warn(attempt, failed)
                    self._lines.pop(offer.place, None)
        raise Lost(f"{len(offer.sources)} ranks of the policy", failed)

    def _attempt(self, offer: Offer, together: int, model: Model) -> str:
        line = self._lines.get(offer.place) or self._lines.setdefault(offer.place, Line(offer.place))
        where = Where.of(model.device)
        if offer.place in self._closed:
            where = where._replace(machine="")
        asked = Asked("", together, self._groups.whole, where)
        passing = self._ask(line, offer, asked)
        route, device = passing.routes[passing.readers.index(self._me)], passing.device(model.device)
        try:
            model.begin()
            self._groups.keep(passing)
            pour = _Pour(offer, model, device)
            if route:
                self._take(pour, passing, route)
            else:
                self._receive(pour, passing, line.meeting)
            pour.check()
        except BaseException:
            self._flight.drop()
            self._groups.drop(passing.group)
            raise
        if route:
            return "by CUDA IPC" if passing.on_gpus else "through shared memory"
        return "by NCCL" if passing.on_gpus else "by gloo"

    def _take(self, pour: _Pour, passing: Passing, route: Route) -> None:
        """Take all buckets out of the memory of ranks of this machine."""
        names, _, _ = pour.offer.key.partition("/")
        key = passing.key(pour.offer.key)
        with ExitStack() as opened:
            try:
                ranks = open_slots(opened, names, set(route), key, self._me, pour.device, STUCK.total_seconds())
            except Unopened:
                self._closed.add(pour.offer.place)
                raise
            for source, number in pour.offer.turns():
                rank = ranks[route[source.rank]]
                if number < len(source.layouts):
                    layout = source.layouts[number]
                    content = rank.bucket(source.rank, number, layout.nbytes)
                    pour.take(source.rank, layout, pour.places(layout), content, in_place=False)
                else:
                    content = rank.bucket(source.rank, number, source.prints)
                    pour.tell(source.rank, content.view(torch.int64).to(pour.device, copy=True))
                rank.done()

    def _receive(self, pour: _Pour, passing: Passing, meeting: Store) -> None:
        """Receive all buckets in groups, each with a sender."""
        flight, device = self._flight, pour.device
        sizes = [layout.nbytes for source in pour.offer.sources for layout in source.layouts]
        flight.begin(max(sizes, default=0), device)
        for source, number in pour.offer.turns():
            group = self._groups.get(meeting, passing, source.rank, self._me, device)
            if number < len(source.layouts):
                layout = source.layouts[number]
                places = pour.places(layout)
                there = bytes_in_place(layout, places, device)
                content = flight.memory(layout.nbytes) if there is None else there
                take = partial(pour.take, source.rank, layout, places, content, in_place=there is not None)
                flight.add(group.broadcast(content), take)
            else:
                content = torch.empty(source.prints, dtype=torch.uint8, device=device)
                flight.add(group.broadcast(content), partial(pour.tell, source.rank, content.view(torch.int64)))
        flight.end()

    def _ask(self, line: Line, offer: Offer, asked: Asked) -> Passing:
        """Ask who reads together."""
        key, token = offer.key, f"{self._me}/{next(self._asked)}"
        line.ask(key, json.dumps(asked._replace(token=token)))
        if not line.store.check([f"{key}/gone"]):
            if not line.comes(f"{key}/told/{token}", time.monotonic() + _ANSWER):
                raise Lost("the policy's ranks", f"its first rank has not answered for {_ANSWER:g} s")
            if told := json.loads(line.store.get(f"{key}/told/{token}")):
                return Passing(*told)
        reason = "the policy has been updated since, and keeps no older ones: publish again"
        raise Lost("the policy's ranks", reason)

    @property
    def _me(self) -> str:
        """The name of this process in groups. It changes after a fork."""
        return f"{self._own}-{os.getpid()}"
