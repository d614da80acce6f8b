"""The schedule of an asynchronous run: the order and places of its samplings, publications and deliveries.

Everything else follows from the seeds, or is recorded, such as episodes of programs. A run that follows the schedule of
another computes the same bits, even at another speed.
"""

import os
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from meshrl.data import BASE, Batch, Weights
from meshrl.errors import DataError
from meshrl.events import gauge
from meshrl.mesh import is_away, min_ranks, replicas
from meshrl.roles import Sampler

CACHE: Final = "KV cache use"
DIFFERENCE: Final = "sampler_difference"
"""The gauge of the distance between a sampler's log-probs and its policy's, after it took new weights."""
_PAUSE: Final = "sampler_pause_s"
"""The gauge of the seconds in which a sampler sampled nothing while it took new weights."""
_REMEDY: Final = "Follow it with the configuration of that run, which is in its config.toml"
_KEYS: Final = {"size": "prompts in a batch", "published_every": "evaluation.every"}
"""Names for users, if they differ from the names in a schedule."""
_PLACES: Final = ("rank", "load", "call", "steps")
_ROWS: Final = "episodes.bin"
_HEAD: Final = struct.Struct("<qqq")
"""Before each recorded row: its group, its number in the group, and its number of bytes."""

Kind: TypeAlias = Literal["draw", "publish", "deliver"]
LoadAll: TypeAlias = Callable[[Weights], Awaitable[Batch | None]]
"""Gives weights to the available ranks of a sampler. Returns the result of `load`, if there is a rank."""


class _Line(msgspec.Struct, tag_field="kind", tag=str.lower, frozen=True):
    """A line of a schedule."""


class Decision(_Line, frozen=True, omit_defaults=True):
    """A stream of rollouts drew `count` prompts, published weights, or delivered these groups."""

    stream: int
    what: Kind
    count: int = 0
    groups: list[int] = []
    owners: list[int] = []
    """For a draw from a sampler with several replicas, the replica of each row."""


class Opened(_Line, frozen=True):
    """The configuration of a stream of rollouts: groups in a batch, the bound, completions of a prompt, replicas."""

    size: int
    ahead: int
    n: int
    late: str
    swap: str
    replicas: int


class Load(_Line, frozen=True):
    """The result of a sampler's `load`: where the calls on its ranks were when new weights arrived."""

    sampler: int
    places: Mapping[str, list[int]]


class Broken(_Line, frozen=True):
    """From here on a stream cannot be replayed, because its rows depend on when a replica died or came."""

    stream: int
    why: str


class Loop(_Line, frozen=True):
    """A loop of `run.steps`. Like streams, it determines how often the sampler gets weights."""

    steps: int
    published_every: int | None
    """Steps between two publications for an evaluation. None if a script publishes its weights itself."""


class Ended(_Line, frozen=True):
    """The loop of this number has ended."""

    loop: int


Entry: TypeAlias = Decision | Opened | Load | Broken | Loop | Ended


def read_schedule(folder: Path) -> list[Entry]:
    """Read the schedule of the run in a folder. DataError if it has none."""
    path = folder / "schedule.jsonl"
    if not path.is_file():
        raise DataError(f"there is no schedule to replay at {path}: a run writes one with run.deterministic = true")
    return msgspec.json.Decoder(Entry).decode_lines(path.read_bytes())


class KeptRows:
    """Rows that no seed reproduces, as an earlier run recorded them, up to the first damage of its file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        """The offset and size of each row. If it was sampled several times, the first comes first."""
        size = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            group, number, length = _HEAD.unpack(head)
            if not 0 <= length <= size - file.tell():
                break
            self._places.setdefault((group, number), deque()).append((file.tell(), length))
            file.seek(length, os.SEEK_CUR)

    def next(self, group: int, number: int) -> bytes | None:
        """Return the bytes of the row's next recording, or None."""
        places = self._places.get((group, number))
        if not places:
            return None
        place, length = places.popleft()
        self._file.seek(place)
        return self._file.read(length)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_kept_rows(folder: Path) -> KeptRows | None:
    """Read the recorded rows of the run in a folder. None if it has none."""
    try:
        return KeptRows((folder / _ROWS).open("rb"))
    except FileNotFoundError:
        return None


class DecisionLog:
    """The decisions of one stream. A run writes them to its schedule, and a replay reads them first."""

    def __init__(
        self,
        write: Callable[[Decision | Broken], None] | None = None,
        number: int = 0,
        decided: Iterable[Decision] = (),
        begin: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._write = write
        self._number = number
        self._decided = deque(decided)
        self._begin = begin
        self._is_broken = False
        self._delivered = {label for each in self._decided if each.what == "deliver" for label in each.groups}

    async def begin(self) -> None:
        """Give the sampler its record before the first decision."""
        if self._begin is not None:
            await self._begin()

    @property
    def is_free(self) -> bool:
        """True if no recorded decision is left: the run replays none, or the replayed one had ended."""
        return not self._decided

    def next(self, what: Kind) -> Decision | None:
        """Return the next recorded decision, if it is of this kind."""
        return self._decided[0] if self._decided and self._decided[0].what == what else None

    def is_turn(self, what: Kind) -> bool:
        """True if this kind of decision is allowed now."""
        return self.is_free or self.next(what) is not None

    def check_dropped(self, labels: AbstractSet[int]) -> None:
        """Raise DataError if the replayed run trained on one of these groups, which `keep` drops."""
        if lost := labels & self._delivered:
            raise DataError(
                f"`keep` drops group {min(lost)}, which the run whose schedule is replayed trained on: its rewards or "
                f"the rule of `keep` were different. {_REMEDY}"
            )

    def break_off(self, why: str) -> None:
        """Record that the schedule cannot be replayed from here on. DataError if this run is a replay."""
        if self._decided:
            raise DataError(
                f"the replayed schedule cannot be followed any more: {why}. Replay it again, with a sampler that lasts"
            )
        if self._write is not None and not self._is_broken:
            self._write(Broken(self._number, why))
        self._is_broken = True

    def note(self, what: Kind, count: int = 0, groups: Sequence[int] = (), owners: Sequence[int] = ()) -> None:
        """Record a decision."""
        if self._decided:
            self._decided.popleft()
        if self._write is not None:
            self._write(Decision(self._number, what, count, list(groups), list(owners)))


class Schedule:
    """Writes a run's schedule and rows into its folder, even after that moves. Follows an earlier run if given."""

    def __init__(self, path: Path, replayed: Sequence[Entry] | None = None, kept_rows: KeptRows | None = None) -> None:
        """`replayed`: the schedule of the run to repeat, from `read_schedule`. `kept_rows`: its recorded rows."""
        self._replays = replayed is not None
        self._replayed = replayed or ()
        self.kept_rows = kept_rows
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._rows: int | None = None
        self._file = path.open("wb")
        self._streams = 0
        self._loops = 0
        self._samplers: list[Sampler] = []

    def decisions(self, sampler: Sampler, opened: Opened) -> DecisionLog:
        """Return the decisions of the next stream. DataError if it is configured differently from the replayed one."""
        number, self._streams = self._streams, self._streams + 1
        before = [each for each in self._replayed if isinstance(each, Opened)][number : number + 1]
        if self._replays and before != [opened]:
            raise DataError(
                "the replayed schedule belongs to another stream of rollouts: "
                f"{_differences(before[0], opened) if before else 'there it was never opened'}. {_REMEDY}"
            )
        for each in self._replayed:
            if isinstance(each, Broken) and each.stream == number:
                raise DataError(f"the schedule cannot be replayed: {each.why}. Take one of a run without that")
        self._write(opened)
        decided = [each for each in self._replayed if isinstance(each, Decision) and each.stream == number]
        return DecisionLog(self._write, number, decided, lambda: self.begin(sampler))

    def loop(self, loop: Loop) -> None:
        """Begin a loop over steps. DataError if weights may arrive differently from the replayed run.

        This holds for fewer steps, for other publications for evaluations, and for more steps if weights arrived after
        the loop. Otherwise more steps run free at the record's end. A run that ended earlier, or had no weights, is not
        checked.
        """
        number, self._loops = self._loops, self._loops + 1
        before = [each for each in self._replayed if isinstance(each, Loop)][number : number + 1]
        if before and not _fits(before[0], loop, self._replayed, number):
            raise DataError(
                "the replayed schedule belongs to another loop, and the sampler might wait for weights that never "
                f"come: {_differences(before[0], loop)}. {_REMEDY}"
            )
        self._write(loop)

    def end_loop(self) -> None:
        """Record the end of the loop that began last."""
        self._write(Ended(self._loops - 1))

    async def begin(self, sampler: Sampler) -> None:
        """Number a sampler. In a replay, give it the places of its loads before anything else."""
        if sampler in self._samplers:
            return
        self._samplers.append(sampler)
        if self._replays:
            number = len(self._samplers) - 1
            loads = [each.places for each in self._replayed if isinstance(each, Load) and each.sampler == number]
            columns = {name: [value for places in loads for value in places[name]] for name in _PLACES}
            await sampler.replay(Batch({name: np.array(column, np.int64) for name, column in columns.items()}))

    def note_load(self, sampler: Sampler, places: Batch) -> None:
        """Record where the calls of a sampler were when it loaded weights."""
        self._write(Load(self._samplers.index(sampler), {name: places.row(name).tolist() for name in _PLACES}))

    def keep_row(self, group: int, number: int, row: bytes) -> None:
        """Record a row that no seed reproduces, by its number in its group."""
        if self._rows is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._rows = os.open(_ROWS, flags, 0o666, dir_fd=self._folder)
        with os.fdopen(self._rows, "wb", closefd=False) as file:
            file.write(_HEAD.pack(group, number, len(row)) + row)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        for each in (self._folder, self._rows):
            if each is not None:
                os.close(each)
        if self.kept_rows is not None:
            self.kept_rows.close()

    def _write(self, entry: Entry) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()


schedule: ContextVar[Schedule | None] = ContextVar("schedule", default=None)
"""The schedule of the current run, if it keeps one."""
Loaded: TypeAlias = Mapping[str, Weights]
"""The newest weights of each adapter by name, and those of the whole model first, as `BASE`."""

newest: Final[WeakKeyDictionary[Sampler, Loaded]] = WeakKeyDictionary()
"""Newest weights of samplers that have adapters, or whose ranks come and go, or are away. A rank that comes gets them.
"""


def renewed(loaded: Loaded, weights: Weights) -> Loaded:
    """Return the newest weights with these ones in place of those of the same adapter."""
    name = BASE if weights.adapter is None else weights.adapter.name
    return dict(sorted({**loaded, name: weights}.items(), key=lambda each: each[0]))


async def load_into(sampler: Sampler, weights: Weights, load: LoadAll | None = None) -> None:
    """Load weights into a sampler, at the place that a replayed schedule has. `load`: replaces the sampler's."""
    if min_ranks(sampler) or sampler in newest or weights.adapter is not None:
        newest[sampler] = renewed(newest.get(sampler, {}), weights)
    if load is None:
        weights = weights.read_by(sum(not is_away(replica) for replica in replicas(sampler)))
    current = schedule.get()
    if current:
        await current.begin(sampler)
    places = await measured(await (load or sampler.load)(weights))
    if current and places is not None:
        current.note_load(sampler, places)


async def measured(returned: Batch | None) -> Batch | None:
    """Fetch the result of a sampler's `load`, and record its measurements."""
    places = await returned.load() if returned is not None else None
    for column, name in (("difference", DIFFERENCE), ("pause", _PAUSE), ("cache", CACHE)):
        if places is not None and column in places:
            gauge(name, float(places.row(column).max()))
    return places


def _fits(before: Loop, now: Loop, entries: Sequence[Entry], number: int) -> bool:
    """True if weights arrive in the loop `now` at the same places, in the same order, as in the replayed loop."""
    loads = [index for index, each in enumerate(entries) if isinstance(each, Load)]
    if before == now or not loads:
        return True
    is_last = Ended(number) not in entries or loads[-1] < entries.index(Ended(number))
    return before.published_every == now.published_every and before.steps < now.steps and is_last


def _differences(replayed: Opened | Loop, current: Opened | Loop) -> str:
    pairs = [(name, getattr(replayed, name), value) for name, value in msgspec.structs.asdict(current).items()]
    return ", ".join(
        f"{_KEYS.get(name, name)} = {'nothing' if before is None else before} there and "
        f"{'nothing' if now is None else now} here"
        for name, before, now in pairs
        if before != now
    )
