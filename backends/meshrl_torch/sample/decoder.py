"""Continuous batching: rows wait, take a slot, grow by one token in each step, and leave.

Slots 0 to `count` are the rows being decoded. The last of them replaces a row that finishes. So each step is one
forward pass over the first slots of the cache.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl_torch.model.decoding import decode, reach_of
from meshrl_torch.model.masks import ALL, grammars_of, restricted, unmasked
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.packing import runs
from meshrl_torch.sample.cache import Slots
from meshrl_torch.sample.draw import Draw, UInt64
from meshrl_torch.sample.rollouts import Finished, Ints, Request, unread, versions_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

PREFILL_TOKENS: Final = 16384
"""Most prompt tokens in one forward pass."""
GROWTH: Final = 32
"""The number of positions of the slots grows in multiples of this."""


def begun(model: LanguageModel, request: Request, row: int) -> "LLMatcher | None":
    """Return the state of a row's constraint after what was drawn of it before. None without one.

    DataError if the constraint does not allow that, or no answer can begin under it.
    """
    text = str(request.constraints[row])
    if not text:
        return None
    drawn = request.prefixes[int(request.prefix[row])][int(request.starts[row]) :]
    return grammars_of(model).begin(text, drawn, f"row {row}")


class Decoder:
    """The rows of one call, or of several with the same sampling, and their slots.

    Waiting rows are admitted once `refill` slots are free, because a prompt's forward pass costs as much as a step, for
    any number of rows. `routed`: as in `Rollouts`.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: Slots,
        request: Request,
        draw: Draw,
        slots: int,
        refill: int | None = None,
        routed: tuple[int, int] = (0, 0),
    ) -> None:
        self._model, self._cache, self._request, self._draw, self._most = model, cache, request, draw, slots
        cache.begin(min(slots, len(request.limits)))
        self._rows = len(request.limits)
        self._slots = min(slots, self._rows)
        self._refill = max(1, slots // 8) if refill is None else refill
        self._next = 0  # the first row that waits
        self._count = 0
        self._matchers = np.full(self._slots, None, np.object_)
        """For each slot, the state of its row's constraint. None without one."""
        self._bits = unmasked(model.known, self._slots)
        """For each slot, the tokens that this state allows next. All of them without one."""
        # For each slot. The place is that of the newest token, which the model has not read yet.
        self._row, self._prompt, self._place, self._end = (np.zeros(self._slots, np.int64) for _ in range(4))
        self._columns: dict[str, NDArray[Any]] = {
            "tokens": np.zeros((self._slots, 0), np.int32),
            "logprobs": np.zeros((self._slots, 0), np.float32),
            "versions": np.zeros((self._slots, 0), np.int32),
            "experts": np.zeros((self._slots, 0, *routed), np.int16),
        }
        """For each slot and place, as in `Finished`."""
        self._records = routed[0] > 0
        self._ends = np.array(sorted(request.ends), np.int32)
        self._calls = 1
        self._call = np.zeros(self._rows, np.int64)  # of each row
        self._seeds = np.broadcast_to(draw.seed, self._rows)
        self._left = {0: self._rows}
        """For each unfinished call, its number of rows that are decoded or wait."""
        self._finished: dict[int, list[Finished]] = {}

    @property
    def filled(self) -> float:
        """The share of the slots that rows are in."""
        return self._count / self._most

    @property
    def busy(self) -> bool:
        """True if a row is decoded or waits."""
        return self._count > 0 or self._next < self._rows

    @property
    def room(self) -> int:
        """Number of rows that would find a slot at once."""
        return self._most - self._count - (self._rows - self._next)

    @property
    def finished(self) -> Iterable[int]:
        """The calls with finished rows that were not taken."""
        return self._finished

    def has(self, call: int) -> bool:
        """True if a row of a call is decoded or waits."""
        return call in self._left

    def add(self, request: Request, seed: UInt64) -> int:
        """Add the rows of another call with the same sampling and its own seed. Returns its number. The first is 0."""
        self._keep(np.arange(self._next, self._rows))
        count = len(request.limits)
        self._request = self._request.joined(request)
        number, self._calls = self._calls, self._calls + 1
        self._left[number] = count
        self._call = np.concatenate([self._call, np.full(count, number)])
        self._seeds = np.concatenate([self._seeds, np.broadcast_to(seed, count)])
        self._rows += count
        self._grow(min(self._most, self._rows))
        return number

    def take(self, call: int = 0) -> Finished | None:
        """Return the rows of a call that finished since the last time."""
        parts = self._finished.pop(call, None)
        if not parts:
            return None
        return Finished(*(np.concatenate([getattr(part, name) for part in parts]) for name in Finished.__match_args__))

    def stop(self, call: int = 0) -> None:
        """End all rows of a call, waiting ones included. `take` returns them as aborted, with their tokens so far."""
        running = self._call[self._row[: self._count]] == call
        self._leave(running, np.zeros(len(running), np.bool_), aborted=True)
        waiting = np.arange(self._next, self._rows)
        others, waiting = waiting[self._call[waiting] != call], waiting[self._call[waiting] == call]
        aborted = unread(self._request, waiting, self._columns["experts"].shape[2:])
        self._finished.setdefault(call, []).append(aborted)
        self._keep(others)
        self._left.pop(call, None)

    @torch.inference_mode()
    def step(self, versions: Mapping[str, int]) -> None:
        """Admit waiting rows if enough slots are free, then sample one token for each row in a slot.

        `versions`: those of the adapters by name.
        """
        waiting = self._rows - self._next
        free = self._slots - self._count
        if waiting and free >= min(self._refill, waiting, self._slots):
            self._admit(min(free, waiting), versions)
        if self._count:
            self._record(0, self._forward(), versions)
            self._retire()

    def _forward(self) -> Tensor:
        """Read the newest token of each slot: float32[count, vocabulary]."""
        count = self._count
        places = self._place[:count]
        self._reserve(int(places.max()) + 2)
        ids = self._columns["tokens"][np.arange(count), places].astype(np.int64)
        adapters = self._request.adapters[self._row[:count]]
        states = self._cache.grow(self._model, ids, places, self._records, adapters)
        if states.experts is not None:
            self._columns["experts"][np.arange(count), places] = states.experts
        return self._model.logits(states.hidden, self._model.reading(adapters))

    def _admit(self, count: int, versions: Mapping[str, int]) -> None:
        """Put the next rows into the slots after the last. Each prefix is read once for all its rows."""
        rows = np.arange(self._next, self._next + count)
        self._next += count
        prefixes = self._request.prefix[rows]
        rows = rows[np.lexsort((prefixes, self._request.lengths[prefixes]))]
        for part in self._affordable(rows):
            first = self._count
            self._count += len(part)
            lengths, starts = self._request.lengths[self._request.prefix[part]], self._request.starts[part]
            here = slice(first, self._count)
            self._row[here], self._prompt[here] = part, starts
            self._begin(here, part)
            self._place[here], self._end[here] = lengths - 1, starts + self._request.limits[part]
            self._reserve(int(lengths.max()) + 1)
            self._record(first, self._prefill(part, np.arange(first, self._count)), versions)
        self._retire()

    def _begin(self, slots: slice, rows: Ints) -> None:
        """Set the states of these rows' constraints after what was drawn of them before."""
        states = np.full(len(rows), None, np.object_)
        for at, row in enumerate(rows.tolist()):
            states[at] = begun(self._model, self._request, row)
        self._matchers[slots] = states
        self._bits[slots] = grammars_of(self._model).fill(states.tolist()) if any(states) else ALL

    def _affordable(self, rows: Ints) -> Iterator[Ints]:
        """Yield runs of rows whose distinct prefixes have at most PREFILL_TOKENS, or that share a longer one."""
        prefixes = self._request.prefix[rows]
        new = np.append(True, prefixes[1:] != prefixes[:-1])
        start = filled = 0
        for index in np.flatnonzero(new).tolist():
            tokens = int(self._request.lengths[prefixes[index]])
            if index > start and filled + tokens > PREFILL_TOKENS:
                yield rows[start:index]
                start, filled = index, 0
            filled += tokens
        yield rows[start:]

    def _prefill(self, rows: Ints, slots: Ints) -> Tensor:
        """Read the prefixes of these rows into their slots. Returns float32[rows, vocabulary] for their last tokens."""
        prefixes, firsts, which = np.unique(self._request.prefix[rows], return_index=True, return_inverse=True)
        order = np.argsort(self._request.lengths[prefixes], kind="stable")
        number = np.argsort(order)[which]  # of each row's prefix, in this order
        ids = [np.array(self._request.prefixes[prefix], np.int64) for prefix in prefixes[order]]
        lengths = self._request.lengths[prefixes[order]]
        mine = lengths[number]
        entries, places = runs((np.cumsum(lengths) - lengths)[number], mine), runs(np.zeros_like(mine), mine)
        slot = np.repeat(slots, mine)
        self._columns["tokens"][slot, places] = np.concatenate(ids)[entries]
        self._columns["logprobs"][slot, places] = 0
        self._columns["versions"][slot, places] = -1
        adapters = self._request.adapters[rows[firsts[order]]]
        images = None if self._request.images is None else self._request.images.take(prefixes[order])
        states = self._cache.fill(self._model, ids, number, slots, self._records, adapters, images)
        if states.experts is not None:
            self._columns["experts"][slot, places] = states.experts[entries]
        logits = self._model.logits(states.hidden, self._model.reading(adapters))
        return logits[torch.from_numpy(number)]

    def _record(self, first: int, logits: Tensor, versions: Mapping[str, int]) -> None:
        """Sample the next token of the slots from `first` on. A row that no token can continue ends, as at its limit.

        One row's constraint may be a dead end that nothing foretells. It must not fail other rows.
        """
        here = slice(first, first + len(logits))
        self._place[here] += 1
        place = self._place[here]
        row = self._row[here]
        draw = replace(self._draw, seed=self._seeds[row])
        own = versions_of(self._request.adapters[row], versions)
        matchers, bits = self._matchers[here].tolist(), self._bits[here]
        kept = np.full(len(matchers), -1)  # of a row that ends here, its number of tokens
        is_held = any(matchers)
        if is_held:
            for at in np.flatnonzero(~bits.any(1)).tolist():
                kept[at] = self._anew(first + at, [])
                if kept[at] == place[at] - self._prompt[first + at] and bits[at].any():
                    kept[at] = -1
                else:
                    self._matchers[first + at], bits[at] = None, ALL
                matchers[at] = self._matchers[first + at]
            logits = restricted(logits, bits)
        tokens, logprobs = draw(logits, self._request.numbers[row], place - self._prompt[here], own)
        if is_held:
            drawn = tokens.tolist()
            for at in grammars_of(self._model).step(matchers, drawn, bits):
                allowed = self._anew(first + at, [drawn[at]])
                kept[at] = -1 if allowed > place[at] - self._prompt[first + at] else allowed
        new = {"tokens": tokens.numpy(), "logprobs": logprobs.numpy(), "versions": own, "experts": -1}
        slots = np.arange(here.start, here.stop)
        for name, values in new.items():  # experts are unknown until the token is read
            self._columns[name][slots, place] = values
        ends = self._prompt[here] + kept
        self._place[here] = np.where(kept < 0, place, ends - 1)
        self._end[here] = np.where(kept < 0, self._end[here], ends)

    def _anew(self, slot: int, new: list[int]) -> int:
        """Follow the answer in a slot, and `new` tokens at its place, by a new grammar. Returns how many it allows."""
        grammars, text = grammars_of(self._model), str(self._request.constraints[self._row[slot]])
        drawn = self._columns["tokens"][slot, self._prompt[slot] : self._place[slot]].tolist()
        self._matchers[slot], allowed = grammars.anew(text, [*drawn, *new])
        self._bits[slot] = grammars.fill([self._matchers[slot]])[0]
        return allowed

    def _retire(self) -> None:
        """Remove rows that ended. The last rows take their slots."""
        count = self._count
        place = self._place[:count]
        ended = np.isin(self._columns["tokens"][np.arange(count), place], self._ends) & (place >= self._prompt[:count])
        if self._request.stop:
            ended |= self._stopped()
        done = ended | (place + 1 >= self._end[:count])
        if not done.any():
            return
        self._leave(done, truncated=~ended)

    def _leave(self, done: NDArray[np.bool_], truncated: NDArray[np.bool_], aborted: bool = False) -> None:
        """Finish the rows of these slots, bool[count], and free them. The last rows take them."""
        slots = np.flatnonzero(done)
        self._finish(slots, truncated[slots], aborted)
        self._count -= len(slots)
        holes = slots[slots < self._count]
        if len(holes):
            self._move(np.flatnonzero(~done[self._count :]) + self._count, holes)

    def _keep(self, waiting: Ints) -> None:
        """Keep only rows in slots and these waiting ones."""
        rows = np.concatenate([self._row[: self._count], waiting])
        request = self._request.select(rows)
        self._request = request if len(waiting) else replace(request, prefixes=(), images=None)
        self._call, self._seeds = self._call[rows], self._seeds[rows]
        self._row[: self._count] = np.arange(self._count)
        self._next, self._rows = self._count, len(rows)

    def _grow(self, slots: int) -> None:
        """Grow to at least this many slots."""
        more = slots - self._slots
        if more <= 0:
            return
        self._slots = self._cache.slots = slots
        self._row, self._prompt, self._place, self._end = (
            np.pad(each, (0, more)) for each in (self._row, self._prompt, self._place, self._end)
        )
        self._matchers = np.append(self._matchers, np.full(more, None, np.object_))
        self._bits = np.append(self._bits, unmasked(self._model.known, more), 0)
        self._pad(more, 0)

    def _pad(self, slots: int, places: int) -> None:
        """Append zeros to the columns."""
        for name, column in self._columns.items():
            self._columns[name] = np.pad(column, ((0, slots), (0, places), *((0, 0),) * (column.ndim - 2)))

    def _finish(self, slots: Ints, truncated: NDArray[np.bool_], aborted: bool) -> None:
        calls = self._call[self._row[slots]]
        for call in np.unique(calls).tolist():
            mine = calls == call
            self._left[call] -= int(mine.sum())
            if not self._left[call]:
                del self._left[call]
            self._finished.setdefault(call, []).append(self._result(slots[mine], truncated[mine], aborted))

    def _result(self, slots: Ints, truncated: NDArray[np.bool_], aborted: bool) -> Finished:
        lengths = self._place[slots] + 1
        count, places = self._columns["tokens"].shape
        flat = runs(slots * places, lengths)
        return Finished(
            rows=self._request.rows[self._row[slots]],
            lengths=lengths,
            prompts=self._prompt[slots],
            truncated=truncated,
            aborted=np.full(len(slots), aborted),
            **{name: column.reshape(count * places, *column.shape[2:])[flat] for name, column in self._columns.items()},
        )

    def _move(self, source: Ints, target: Ints) -> None:
        longest = int(self._place[source].max()) + 1
        columns = self._columns.values()
        for state in (self._row, self._prompt, self._place, self._end, self._matchers, self._bits, *columns):
            state[target] = state[source]
        self._cache.move(torch.from_numpy(source), torch.from_numpy(target), longest)

    def _stopped(self) -> NDArray[np.bool_]:
        """True for each row in a slot that ends with a stop text, bool[count]."""
        reach = reach_of(self._request.stop)
        lasts = self._place[: self._count] + 1
        begins = np.maximum(self._prompt[: self._count], lasts - reach)
        spans = list(zip(self._columns["tokens"], begins.tolist(), lasts.tolist(), strict=False))
        tails = [tokens[begin:last].tolist() for tokens, begin, last in spans]
        texts = decode(self._model, tails, [tokens[begin - 1 : begin].tolist() for tokens, begin, _ in spans])
        return np.array([any(stop in text for stop in self._request.stop) for text in texts], np.bool_)

    def _reserve(self, positions: int) -> None:
        """Make room for this many tokens in each slot."""
        had = room = self._columns["tokens"].shape[1]
        if positions > room:
            room = -(-max(positions, room + room // 2) // GROWTH) * GROWTH
            self._pad(0, room - had)
        self._cache.reserve(room)
