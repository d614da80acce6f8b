"""Read weights that a policy's ranks broadcast, bucket by bucket. Engines' processes read too. They have no meshrl."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from secrets import token_hex
from threading import Lock
from typing import Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from meshrl_hf.collective import Asked, Flight, Group, Groups, Line, Passing, bytes_in_place, view
from meshrl_hf.fingerprints import copied, fingerprint
from meshrl_hf.offer import Layout, Offer, Part, Source

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
        super().__init__(f"{len(names)} tensors differ ({', '.join(names[:3])})")


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


class _Bucket(NamedTuple):
    """A bucket, its parts' places, and its bytes, which may be in the place of the only part."""

    layout: Layout
    places: Sequence[Tensor]
    content: Tensor
    in_place: bool

    def take(self, made: list[Tensor], dtype: torch.dtype, model: Model) -> None:
        """Copy the parts to their places after they have arrived. Adds their fingerprints."""
        if self.in_place:
            made.append(fingerprint(self.content)[None])
        else:
            parts = [view(self.content, part, dtype) for part in self.layout.parts]
            made.append(torch.stack([copied(place, part) for place, part in zip(self.places, parts, strict=True)]))
        for part in self.layout.parts:
            model.arrived(part)


class Reader:
    """The end of a process that reads. It keeps its groups and buckets from one version to the next."""

    def __init__(self) -> None:
        self._reading = Lock()
        """One actor of the process reads at a time, because its groups identify the process."""
        self._groups = Groups()
        self._flight = Flight()
        self._lines: dict[str, Line] = {}
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
                    self._lines.pop(offer.place, None)
        raise Lost(f"{len(offer.sources)} ranks of the policy", failed)

    def _attempt(self, offer: Offer, together: int, model: Model) -> str:
        line = self._lines.get(offer.place) or self._lines.setdefault(offer.place, Line(offer.place))
        passing = self._ask(line, offer, Asked("", together, self._groups.whole, model.device.type == "cuda"))
        try:
            model.begin()
            number = passing.members.index(self._me) + 1
            device = passing.device(model.device)
            ranks = [source.rank for source in offer.sources]
            groups = {rank: self._groups.get(line.meeting, passing, rank, number, device) for rank in ranks}
            prints = self._receive(offer, groups, device, model)
        except BaseException:
            self._flight.drop()
            self._groups.drop(passing.group)
            raise
        for source in offer.sources:
            _compare(source, *prints[source.rank])
        return "NCCL" if passing.on_gpus else "gloo"

    def _receive(self, offer: Offer, groups: Mapping[int, Group], device: torch.device, model: Model) -> "_Prints":
        """Receive all buckets. After the last one of each sender, receive the fingerprints of its parts."""
        dtype: torch.dtype = getattr(torch, offer.dtype)
        made: dict[int, list[Tensor]] = {rank: [] for rank in groups}
        told: dict[int, Tensor] = {}
        last = {source.rank: source.layouts[-1] for source in offer.sources if source.layouts}
        count = {source.rank: sum(len(layout.parts) for layout in source.layouts) for source in offer.sources}
        buckets = offer.buckets()
        self._flight.begin((layout for _, layout in buckets), device)
        for rank, layout in buckets:
            places = [model.place(part) for part in layout.parts]
            in_place = bytes_in_place(places, dtype, device)
            content = self._flight.memory(layout.nbytes) if in_place is None else in_place
            bucket = _Bucket(layout, places, content, in_place is not None)
            self._flight.add(groups[rank].broadcast(content), partial(bucket.take, made[rank], dtype, model))
            if layout is last[rank]:
                told[rank] = torch.empty(count[rank], dtype=torch.int64, device=device)
                self._flight.add(groups[rank].broadcast(told[rank]))
        self._flight.end()
        return {rank: (made[rank], told[rank]) if rank in told else ([], torch.empty(0)) for rank in groups}

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


_Prints: TypeAlias = Mapping[int, tuple[Sequence[Tensor], Tensor]]
"""The fingerprints of parts by sender: those made here, by bucket, and those that it has sent."""


def _compare(source: Source, made: Sequence[Tensor], told: Tensor) -> None:
    """Raise Damaged if fingerprints of a sender's parts differ from those made here."""
    if not made:
        return
    parts = [part for layout in source.layouts for part in layout.parts]
    here = torch.cat(list(made))
    differ: list[bool] = (here != told.to(here.device)).tolist()
    if any(differ):
        raise Damaged([part.name for part, differs in zip(parts, differ, strict=True) if differs])
