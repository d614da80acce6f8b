"""Weights that a policy's ranks broadcast from their shards, bucket by bucket: the sending side.

Readers that can open a rank's memory take buckets from there (`handover`). Each rank is also the root of a process
group, whose other members are the readers elsewhere, and the ranks that hand its buckets to readers near them. So no
rank gathers anything, and each reader receives each byte once. They meet in the store of the policy's ranks: a reader
asks there (`reading`), the policy's first rank decides who reads together, and all of its ranks start to send.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf
from secrets import token_hex
from typing import Final

import torch
from torch import Tensor

from meshrl import log
from meshrl.errors import ConfigError
from meshrl.mesh import PATIENCE, Rank
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.ranks.process_group import are_processes, meet, place
from meshrl_torch.ranks.rank_group import RankGroup
from meshrl_torch.weights.buckets import Bucket, planned
from meshrl_torch.wire.collective import (
    ALIGNED,
    CPU,
    IN_FLIGHT,
    KEPT,
    STUCK,
    Asked,
    Flight,
    Group,
    Groups,
    Line,
    Passing,
    bytes_in_place,
)
from meshrl_torch.wire.fingerprints import fingerprint
from meshrl_torch.wire.handover import Desk, Handing, desk_of
from meshrl_torch.wire.locality import Where, on_gpus, routes
from meshrl_torch.wire.manifest import Layout, Source, turns

_APART: Final = 2 << 20
"""Bytes of the limit that buckets leave to fingerprints, plans, threads and the rounding to large pages. At most an
eighth of the limit. Twice as much stays free, because buckets may take twice the limit."""
_APART_IN_FP8: Final = 4 << 20
"""Further bytes that they leave to numbers in float32 which become FP8."""


class Sender:
    """The end of one policy rank. Between two changes of the parameters, it sends them to each reader that asks."""

    def __init__(
        self, ranks: RankGroup, rank: Rank, device: torch.device, dtype: torch.dtype, limit: int,
        matrices: Collection[str] = frozenset(),
    ) -> None:  # fmt: skip
        """All ranks construct theirs together. `limit`: half the bytes of memory for buckets. `matrices`: sent in FP8.

        Raises ConfigError if the ranks are not processes.
        """
        if not are_processes(rank):
            raise ConfigError(
                'policy.weight_sync = "broadcast" sends weights between processes, but ranks of the local engine are '
                "threads: set run.engine = 'processes', or remove weight_sync"
            )
        meet(rank)
        self.place: Final = place()
        told = ranks.agree(lambda: (token_hex(8), Where.of(device)))
        self._names = told[0][0]
        self._policy: Final = [where for _, where in told]
        self.number: Final = rank.index
        self._desk = Desk(desk_of(self._names, rank.index)) if self._policy[rank.index].machine else None
        self.dtype: Final = str(dtype).removeprefix("torch.")
        """The name of the dtype."""
        self._device, self._dtype, self._matrices = device, dtype, matrices
        apart = _APART + _APART_IN_FP8 if matrices else _APART
        self._limit = 2 * (limit - min(limit // 8, apart)) // IN_FLIGHT // ALIGNED * ALIGNED
        self._line = Line(self.place)
        self._other = Line(self.place)
        """A second one, for requests that must not wait behind others."""
        self._offers = 0
        self._sending: threading.Thread | None = None
        self._flight = Flight()
        self._groups = Groups()
        self._known: list[Passing] = []
        """The readers whose groups are kept. Used by the rank that decides who reads together."""

    def offer(self, boxes: Iterable[Box]) -> tuple[str, tuple[Layout, ...]]:
        """Offer this rank's parts, as they are when they are sent. Returns the offer's name and the buckets."""
        self.end()
        self._offers += 1
        key = f"{self._names}/{self._offers}"
        buckets = planned(boxes, self._dtype, self._limit, self._matrices)
        self._sending = threading.Thread(target=self._serve, args=(key, buckets), name="meshrl-sender", daemon=True)
        self._sending.start()
        return key, tuple(bucket.layout for bucket in buckets)

    def end(self) -> None:
        """End the offer before the parameters change. Waits until nobody reads them."""
        if self._sending is not None:
            self.leave()
            self._sending.join()
            self._sending = None

    def leave(self) -> None:
        """End the offer without waiting. The first rank does so for all."""
        if self._sending is not None and self.number == 0:
            with suppress(RuntimeError):  # the store is gone, and with it everybody who waits there
                self._other.ask(f"{self._names}/{self._offers}", "")

    def _serve(self, key: str, buckets: Sequence[Bucket]) -> None:
        passes = _Passes(self._line, key, self._known, self._policy) if self.number == 0 else None
        number = 0
        try:
            while passing := (passes.next() if passes else _told(self._line, f"{key}/pass/{number}")):
                number += 1
                self._send(key, passing, buckets)
        except Exception as error:  # noqa: BLE001 -- such as a store that is gone, with the policy's first rank
            log.warning("weights are no longer sent", error=str(error))
            if passes:
                with suppress(RuntimeError):  # the others would wait for it, and readers too
                    passes.end(self._other)

    def _send(self, key: str, passing: Passing, buckets: Sequence[Bucket]) -> None:
        """Send all buckets, then their fingerprints. Readers see an error too, and ask again."""
        try:
            self._pass(key, passing, buckets)
        except (RuntimeError, OSError) as error:
            log.warning("weights did not reach all readers", readers=len(passing.readers), error=str(error))
            self._flight.drop()
            self._groups.drop(passing.group)
            self._known[:] = [each for each in self._known if each.group != passing.group]

    def _pass(self, key: str, passing: Passing, buckets: Sequence[Bucket]) -> None:
        """Send this rank's buckets, and pass on those that readers get by this rank."""
        me, device, takers = self.number, passing.device(self._device), passing.takers(self.number)
        sizes = self._sizes(key, passing, [bucket.layout for bucket in buckets])
        self._flight.begin(max(chain(*sizes.values()), default=0), device, shared=bool(takers))
        self._groups.only(passing.kept)

        def group(rank: int) -> Group | None:
            if not passing.members(rank):
                return None
            if rank not in self._groups.keep(passing):
                self._flight.arrive()  # readers may wait for what is here, and others of the group for those
            return self._groups.get(self._line.meeting, passing, rank, str(me), device)

        with self._admitted(passing.key(key), takers) as handing:
            hop = Hop(me, self._flight, group, handing, takers)
            made: list[Tensor] = []
            for rank, number in turns({rank: len(each) - 1 for rank, each in sizes.items()}):
                if rank != me:
                    hop.send(rank, number, self._flight.memory(sizes[rank][number]))
                elif number < len(buckets):
                    made.append(hop.send_parts(number, buckets[number], device))
                else:
                    hop.send_prints(number, torch.stack(made))
            self._flight.end()

    def _sizes(self, key: str, passing: Passing, layouts: Sequence[Layout]) -> Mapping[int, Sequence[int]]:
        """Return the bytes of all buckets and fingerprints that this rank sends or passes on, by their sender."""
        prints = Source(self.number, tuple(layouts)).prints
        found = {self.number: [*(layout.nbytes for layout in layouts), prints]}
        if passing.relayed(self.number):
            self._line.store.set(f"{key}/sizes/{self.number}", json.dumps(found[self.number]))
        for rank in passing.takers(self.number).keys() - found.keys():
            if not self._line.comes(f"{key}/sizes/{rank}", time.monotonic() + STUCK.total_seconds()):
                raise TimeoutError(f"rank {rank} has not said how large its buckets are")
            found[rank] = json.loads(self._line.store.get(f"{key}/sizes/{rank}"))
        return found

    def _admitted(self, key: str, takers: Mapping[int, Sequence[str]]) -> Handing:
        """Wait for the readers that get buckets by this rank."""
        tokens = {token for each in takers.values() for token in each}
        if not self._desk or not tokens:
            return Handing({}, CPU)
        return self._desk.admit(key, tokens, self._flight.slots, STUCK.total_seconds())


class Hop:
    """The way of buckets on from one rank, in one pass."""

    def __init__(
        self, rank: int, flight: Flight, group: Callable[[int], Group | None], handing: Handing,
        takers: Mapping[int, Sequence[str]],
    ) -> None:  # fmt: skip
        """`group`: returns a sender's group, if it has readers or ranks to send to."""
        self.rank: Final = rank
        self._flight, self._group, self._handing, self._takers = flight, group, handing, takers

    def send(self, rank: int, number: int, content: Tensor) -> None:
        """Send a bucket, or receive that of another rank, and hand it over."""
        group, tokens = self._group(rank), self._takers.get(rank)
        work = group.broadcast(content) if group else None
        if not tokens:
            self._flight.add(work)
            return
        give = partial(self._handing.give, tokens, rank, number, self._flight.slot)
        copied_by_all = partial(self._handing.wait, tokens, self._flight.slot)
        if rank == self.rank:
            give()
            self._flight.add(work, copied_by_all)
        else:
            self._flight.add(work, copied_by_all, arrived=give)

    def send_parts(self, number: int, bucket: Bucket, device: torch.device) -> Tensor:
        """Send a bucket of this rank's parts, from their own memory if that is possible. Returns its fingerprint."""
        sources = [piece.tensor for piece in bucket.pieces]
        content = None if self.rank in self._takers else bytes_in_place(bucket.layout, sources, device)
        if content is None:
            content = self._flight.memory(bucket.layout.nbytes)
            bucket.write(content)
        self.send(self.rank, number, content)
        return fingerprint(content)

    def send_prints(self, number: int, prints: Tensor) -> None:
        """Send the fingerprints of this rank's buckets."""
        content = prints.view(torch.uint8)
        if self.rank in self._takers:
            content = self._flight.memory(len(content)).copy_(content)
        self.send(self.rank, number, content)


class _Passes:
    """Decides for the first rank who reads together: readers that ask, as many as they announce."""

    def __init__(self, line: Line, key: str, known: list[Passing], policy: Sequence[Where]) -> None:
        """`policy`: where its ranks are."""
        self._line, self._key, self._known, self._policy = line, key, known, policy
        self._number = 0
        self._ended = False
        self._asked: list[Asked] = []
        """Readers that have not been told yet."""

    def next(self) -> Passing | None:
        """Wait for readers. None once the offer has ended."""
        asked, deadline = self._asked, inf
        while not self._ended and (not asked or len(asked) < max(each.together for each in asked)):
            said = self._line.asked(self._key, deadline)
            if said is None:
                log.warning("weights are sent without a reader that has not asked for them", there=len(asked))
                break
            if said:
                asked.append(Asked.read(said))
                deadline = min(deadline, time.monotonic() + PATIENCE)
            else:
                self._ended = True
        if not asked:
            self.end(self._line)
            return None
        passing = self._passing(asked)
        told = json.dumps(passing)
        self._line.store.set(f"{self._key}/pass/{self._number}", told)
        self._number += 1
        while asked:
            self._line.store.set(f"{self._key}/told/{asked[0].token}", told)
            asked.pop(0)
        return passing

    def end(self, line: Line) -> None:
        """End the offer for all: the other ranks, readers that have asked, and readers that will."""
        line.store.set(f"{self._key}/pass/{self._number}", json.dumps(None))
        line.store.set(f"{self._key}/gone", "1")
        tokens = [each.token for each in self._asked]
        while (said := line.pending(self._key)) is not None:
            tokens += [Asked.read(said).token] if said else []
        for token in tokens:
            line.store.set(f"{self._key}/told/{token}", json.dumps(None))

    def _passing(self, asked: "Sequence[Asked]") -> Passing:
        """Choose routes, and groups that all readers still have. Each sender keeps at least those known here."""
        readers = {each.token.partition("/")[0]: each.where for each in asked}
        members, places = sorted(readers), [readers[token] for token in sorted(readers)]
        gpus = on_gpus(self._policy, places)
        made = Passing(token_hex(8), members, gpus, routes(self._policy, places, gpus), [])
        for known in self._known:
            if known._replace(group=made.group) == made and all(known.group in each.groups for each in asked):
                made = known
        if made not in self._known:
            self._known[:] = [*self._known, made][-KEPT:]
        return made._replace(kept=[known.group for known in self._known])


def _told(line: Line, key: str) -> Passing | None:
    line.comes(key)
    told = json.loads(line.store.get(key))
    return Passing(*told) if told else None
