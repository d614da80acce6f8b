"""The logical schedule of an asynchronous run: what was sampled, published and delivered, in which order and where.

All else follows from the seeds. A run that follows the schedule of another computes the same bits, however the two
differ in speed.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from pathlib import Path
from typing import Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.events import gauge
from meshrl.mesh import is_away, min_ranks, replicas
from meshrl.roles import Sampler
from meshrl.rollout.kept_rows import KeptRows, RowKeeper
from meshrl.weights import Weights

Kind: TypeAlias = Literal["draw", "publish", "deliver"]


class Decision(msgspec.Struct, tag_field="kind", tag="decision", frozen=True, omit_defaults=True):
    """A stream of rollouts drew so many prompts, published, or delivered these groups."""

    stream: int
    what: Kind
    count: int = 0
    groups: list[int] = []
    owners: list[int] = []
    """Of a draw from a sampler of several replicas: the one that each row went to."""


class Opened(msgspec.Struct, tag_field="kind", tag="opened", frozen=True):
    """A stream of rollouts, as it was configured: groups in a batch, the bound, completions of a prompt, replicas."""

    size: int
    ahead: int
    n: int
    late: str
    swap: str
    replicas: int


class Load(msgspec.Struct, tag_field="kind", tag="load", frozen=True):
    """Where the calls on a sampler's ranks stood when new weights came: what its `load` returned."""

    sampler: int
    places: Mapping[str, list[int]]


class Broken(msgspec.Struct, tag_field="kind", tag="broken", frozen=True):
    """From here on a stream cannot be followed: where its rows were drawn hung on when a replica died or came."""

    stream: int
    why: str


class Loop(msgspec.Struct, tag_field="kind", tag="loop", frozen=True):
    """A loop of `run.steps`: what decides, beside streams, how often the sampler is given weights."""

    steps: int
    published_every: int | None
    """Steps between two publications for an evaluation; None where a script publishes its weights itself."""


class Ended(msgspec.Struct, tag_field="kind", tag="ended", frozen=True):
    """The loop of this number came to its end."""

    loop: int


Entry: TypeAlias = Decision | Opened | Load | Broken | Loop | Ended
_decoder = msgspec.json.Decoder(Entry)


class DecisionLog:
    """The decisions of one stream: written down where a run keeps a schedule, and read first where it repeats one."""

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
        """Before the first decision: tell the sampler what it is to repeat."""
        if self._begin is not None:
            await self._begin()

    @property
    def is_free(self) -> bool:
        """Whether nothing says what is to be done: in a run that repeats none, or when that one had ended."""
        return not self._decided

    def next(self, what: Kind) -> Decision | None:
        """What was decided next in the run that is repeated, if it is of this kind."""
        return self._decided[0] if self._decided and self._decided[0].what == what else None

    def is_turn(self, what: Kind) -> bool:
        """Whether this may be done now."""
        return self.is_free or self.next(what) is not None

    def check_dropped(self, labels: AbstractSet[int]) -> None:
        """`keep` does not want these groups. DataError where the run that is repeated trained on one."""
        if lost := labels & self._delivered:
            raise DataError(
                f"`keep` drops group {min(lost)}, which the run whose schedule is replayed trained on: its rewards or "
                f"the rule of `keep` were different. {_REMEDY}"
            )

    def break_off(self, why: str) -> None:
        """Nobody can follow from here on. DataError where this run follows another: it cannot, either."""
        if self._decided:
            raise DataError(
                f"the replayed schedule cannot be followed any more: {why}. Replay it again, with a sampler that lasts"
            )
        if self._write is not None and not self._is_broken:
            self._write(Broken(self._number, why))
        self._is_broken = True

    def note(self, what: Kind, count: int = 0, groups: Sequence[int] = (), owners: Sequence[int] = ()) -> None:
        """A decision was taken."""
        if self._decided:
            self._decided.popleft()
        if self._write is not None:
            self._write(Decision(self._number, what, count, list(groups), list(owners)))


class Schedule:
    """Writes a run's schedule, and follows that of an earlier run if there is one."""

    def __init__(self, path: Path, replayed: Sequence[Entry] | None = None, kept_rows: KeptRows | None = None) -> None:
        """`replayed`: what `read_schedule` gave of the run that is to be repeated; `kept_rows`: what it kept."""
        self._replayed = replayed
        self.rows: RowKeeper = RowKeeper(path.parent, kept_rows)
        """For samplers whose rows no seed draws again."""
        self._file = path.open("wb")
        self._streams = 0
        self._loops = 0
        self._samplers: list[Sampler] = []

    def decisions(self, sampler: Sampler, opened: Opened) -> DecisionLog:
        """The decisions of the next stream. DataError where it is not configured as the one that is repeated."""
        number, self._streams = self._streams, self._streams + 1
        before = [each for each in self._replayed or () if isinstance(each, Opened)][number : number + 1]
        if self._replayed is not None and before != [opened]:
            raise DataError(
                "the replayed schedule belongs to another stream of rollouts: "
                f"{_differing(before[0], opened) if before else 'there it was never opened'}. {_REMEDY}"
            )
        for each in self._replayed or ():
            if isinstance(each, Broken) and each.stream == number:
                raise DataError(f"the schedule cannot be replayed: {each.why}. Take one of a run without that")
        self.write(opened)
        decided = [each for each in self._replayed or () if isinstance(each, Decision) and each.stream == number]
        return DecisionLog(self.write, number, decided, lambda: self._number(sampler))

    def loop(self, loop: Loop) -> None:
        """A loop over steps begins. DataError where weights may come otherwise than in the run that is repeated.

        So they may with fewer steps, with other publications for an evaluation, and, where some came after the loop,
        with more steps, which go on when the record ends. A run that had ended before, or had no weights, says nothing.
        """
        number, self._loops = self._loops, self._loops + 1
        entries = self._replayed or ()
        before = [each for each in entries if isinstance(each, Loop)][number : number + 1]
        if before and not _fits(before[0], loop, entries, number):
            raise DataError(
                "the replayed schedule belongs to another loop, and the sampler might wait for weights that never "
                f"come: {_differing(before[0], loop)}. {_REMEDY}"
            )
        self.write(loop)

    def end_loop(self) -> None:
        """The loop that began last came to its end."""
        self.write(Ended(self._loops - 1))

    async def load(self, sampler: Sampler, weights: Weights, load: "LoadAll | None" = None) -> None:
        """Load weights into a sampler, at the place where the replayed run did."""
        await self._number(sampler)
        places = await _told(await (load or sampler.load)(weights))
        if places is not None:
            self.write(Load(self._samplers.index(sampler), {name: places.row(name).tolist() for name in _PLACES}))

    async def _number(self, sampler: Sampler) -> None:
        """Know the sampler; in a replay tell it, before anything else, where its weights came."""
        if sampler not in self._samplers:
            self._samplers.append(sampler)
            if self._replayed is not None:
                await sampler.replay(self._record(len(self._samplers) - 1, self._replayed))

    def write(self, entry: Entry) -> None:
        """Add a line."""
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Write no more."""
        self._file.close()
        self.rows.close()

    def _record(self, sampler: int, entries: Sequence[Entry]) -> Batch:
        loads = [each.places for each in entries if isinstance(each, Load) and each.sampler == sampler]
        columns = {name: [value for places in loads for value in places[name]] for name in _PLACES}
        return Batch({name: np.array(column, np.int64) for name, column in columns.items()})


DIFFERENCE: Final = "sampler_difference"
"""The gauge of how far a sampler's log-probs are from its policy's, after it took new weights."""
PAUSE: Final = "sampler_pause_s"
"""The gauge of how long a sampler drew nothing while it took new weights."""
_REMEDY: Final = "Follow it with the configuration of that run, which its config.toml tells"
_WORDS: Final = {"size": "prompts in a batch", "published_every": "evaluation.every"}
"""For users, of what is called otherwise in a schedule."""
_PLACES: Final = ("rank", "load", "call", "steps")

schedule: ContextVar[Schedule | None] = ContextVar("schedule", default=None)
"""The schedule of the current run, where it keeps one."""


newest: Final[WeakKeyDictionary[Sampler, Weights]] = WeakKeyDictionary()
"""Of samplers whose ranks come and go, or are away, the weights that they were given last: who comes is given them."""
LoadAll: TypeAlias = Callable[[Weights], Awaitable[Batch | None]]
"""Gives weights to those ranks of a sampler that are there; what its `load` returns, where any is."""


async def load_into(sampler: Sampler, weights: Weights, load: LoadAll | None = None) -> None:
    """Load weights into a sampler, as the run's schedule says where it has one. `load`: in place of the sampler's."""
    if min_ranks(sampler) or sampler in newest:
        newest[sampler] = weights
    if load is None:
        weights = weights.read_by(sum(not is_away(replica) for replica in replicas(sampler)))
    if kept := schedule.get():
        await kept.load(sampler, weights, load)
    else:
        await _told(await (load or sampler.load)(weights))


async def load_alone(replica: Sampler, weights: Weights) -> None:
    """Load weights into one replica of a sampler that the others have, which no schedule repeats."""
    await _told(await replica.load(weights))


async def _told(returned: Batch | None) -> Batch | None:
    """What a load returned; what it found is noted."""
    places = await returned.load() if returned is not None else None
    for column, name in (("difference", DIFFERENCE), ("pause", PAUSE)):
        if places is not None and column in places:
            gauge(name, float(places.row(column).max()))
    return places


def _fits(there: Loop, here: Loop, entries: Sequence[Entry], number: int) -> bool:
    """Whether the weights that the loop of this number had come in another one, too, and in the same order."""
    loads = [index for index, each in enumerate(entries) if isinstance(each, Load)]
    if there == here or not loads:
        return True
    is_last = Ended(number) not in entries or loads[-1] < entries.index(Ended(number))
    return there.published_every == here.published_every and there.steps < here.steps and is_last


def _differing(there: Opened | Loop, here: Opened | Loop) -> str:
    told = [
        (_WORDS.get(name, name), getattr(there, name), value) for name, value in msgspec.structs.asdict(here).items()
    ]
    return ", ".join(
        f"{name} = {'nothing' if before is None else before} there and {'nothing' if now is None else now} here"
        for name, before, now in told
        if before != now
    )


def read_schedule(folder: Path) -> list[Entry]:
    """Read the schedule of the run in a folder. DataError if it has none."""
    path = folder / "schedule.jsonl"
    if not path.is_file():
        raise DataError(f"there is no schedule to replay at {path}: a run writes one with run.deterministic = true")
    return [_decoder.decode(line) for line in path.read_bytes().splitlines() if line]
