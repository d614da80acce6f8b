"""Continuous batching: rows wait, take a slot, grow by a token a step, and leave; the next ones take over.

Slots 0 to `count` are the rows being decoded. A row that finishes is replaced by the last of them, so that each
step is one forward pass over the first slots of the cache, whatever finished.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshrl_torch.attention import Packed
from meshrl_torch.cache import Cache, Decode, Prefill
from meshrl_torch.draw import Draw
from meshrl_torch.model import LanguageModel
from meshrl_torch.packing import groups_of, runs
from meshrl_torch.text import decode

Ints = NDArray[np.int64]

PREFILL_TOKENS: Final = 16384
"""Prompt tokens in one forward pass."""
GROWTH: Final = 32
"""Positions are added to the slots in multiples of this."""


@dataclass(frozen=True)
class Request:
    """What one call of `generate` asks for."""

    prompts: Sequence[Sequence[int]]
    """Different prompts, each of one token or more."""
    prompt: Ints
    """Which of them each row continues, int64[rows]; rows of one prompt are best adjacent."""
    limits: Ints
    """The most new tokens of each row, int64[rows]."""
    numbers: Ints
    """What each row's random numbers hang on, int64[rows]."""
    ends: frozenset[int]
    """The tokens that end a row."""
    stop: tuple[str, ...]


@dataclass(frozen=True)
class Finished:
    """Rows that are done. Token arrays are flat, [sum of lengths]; the prompt is part of a row."""

    rows: Ints
    lengths: Ints
    prompts: Ints
    """Tokens of each row's prompt."""
    truncated: NDArray[np.bool_]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


class Decoder:
    """The rows of one call, and the slots they are in.

    `refill` is how many free slots it takes before waiting rows are let in: a prompt's forward pass costs as much
    as a step, whether it is for one row or for many.
    """

    def __init__(
        self, model: LanguageModel, cache: Cache, request: Request, draw: Draw, slots: int, refill: int | None = None
    ) -> None:
        self._model = model
        self._cache = cache
        cache.begin(min(slots, len(request.limits)))
        self._request = request
        self._draw = draw
        self._lengths = np.fromiter(map(len, request.prompts), np.int64, len(request.prompts))
        self._rows = len(request.limits)
        self._slots = min(slots, self._rows)
        self._refill = max(1, slots // 8) if refill is None else refill
        self._next = 0  # the first row that waits
        self._count = 0
        self._row = np.zeros(self._slots, np.int64)
        self._prompt = np.zeros(self._slots, np.int64)
        self._place = np.zeros(self._slots, np.int64)  # of the newest token, which the model has not read yet
        self._end = np.zeros(self._slots, np.int64)
        self._tokens = np.zeros((self._slots, 0), np.int32)
        self._logprobs = np.zeros((self._slots, 0), np.float32)
        self._versions = np.zeros((self._slots, 0), np.int32)
        self._ends = np.array(sorted(request.ends), np.int32)
        self._finished: list[Finished] = []

    @property
    def busy(self) -> bool:
        """Whether a row is being decoded or waits."""
        return self._count > 0 or self._next < self._rows

    def take(self) -> Finished | None:
        """The rows that finished since the last call."""
        parts, self._finished = self._finished, []
        if not parts:
            return None
        return Finished(*(np.concatenate([getattr(part, name) for part in parts]) for name in Finished.__match_args__))

    @torch.inference_mode()
    def step(self, version: int) -> None:
        """Let waiting rows in if enough slots are free, then one token for each row in a slot."""
        waiting = self._rows - self._next
        free = self._slots - self._count
        if waiting and free >= min(self._refill, waiting, self._slots):
            self._admit(min(free, waiting), version)
        if self._count:
            self._record(0, self._forward(), version)
            self._retire()

    def _forward(self) -> Tensor:
        """Read the newest token of each slot: float32[count, vocabulary]."""
        count = self._count
        places = self._place[:count]
        longest = int(places.max()) + 1
        self._reserve(longest + 1)
        ids = self._tokens[np.arange(count), places].astype(np.int64)
        positions = torch.from_numpy(places.copy())
        attend = Decode(self._cache, positions, longest, even=int(places.min()) + 1 == longest)
        hidden = self._model.hidden(torch.from_numpy(ids)[:, None], positions[:, None], attend)
        return self._model.logits(hidden[:, 0])

    def _admit(self, count: int, version: int) -> None:
        """The next rows take the slots after the last; each prompt is read once for all its rows."""
        rows = np.arange(self._next, self._next + count)
        self._next += count
        prompts = self._request.prompt[rows]
        rows = rows[np.lexsort((prompts, self._lengths[prompts]))]
        for part in self._affordable(rows):
            first = self._count
            self._count += len(part)
            lengths = self._lengths[self._request.prompt[part]]
            here = slice(first, self._count)
            self._row[here], self._prompt[here] = part, lengths
            self._place[here], self._end[here] = lengths - 1, lengths + self._request.limits[part]
            self._reserve(int(lengths.max()) + 1)
            self._record(first, self._prefill(part, np.arange(first, self._count)), version)
        self._retire()

    def _affordable(self, rows: Ints) -> Iterator[Ints]:
        """Runs of rows whose different prompts are PREFILL_TOKENS at most, or of one prompt that is longer."""
        prompts = self._request.prompt[rows]
        new = np.append(True, prompts[1:] != prompts[:-1])
        start = filled = 0
        for index in np.flatnonzero(new).tolist():
            tokens = int(self._lengths[prompts[index]])
            if index > start and filled + tokens > PREFILL_TOKENS:
                yield rows[start:index]
                start, filled = index, 0
            filled += tokens
        yield rows[start:]

    def _prefill(self, rows: Ints, slots: Ints) -> Tensor:
        """Read the prompts of these rows into their slots: float32[rows, vocabulary] of the last token of each."""
        prompts, which = np.unique(self._request.prompt[rows], return_inverse=True)
        order = np.argsort(self._lengths[prompts], kind="stable")
        lengths = self._lengths[prompts[order]]
        ids = np.concatenate([self._request.prompts[prompt] for prompt in prompts[order]]).astype(np.int64)
        ends = np.cumsum(lengths)
        at = np.empty_like(ends)
        at[order] = ends - lengths  # where each prompt starts in the packed sequence
        mine = self._lengths[prompts[which]]
        entries, places = runs(at[which], mine), runs(np.zeros_like(mine), mine)
        slot = np.repeat(slots, mine)
        self._tokens[slot, places] = ids[entries]
        self._logprobs[slot, places] = 0
        self._versions[slot, places] = -1
        attend = Prefill(
            Packed(groups_of(lengths, lengths)), self._cache, *map(torch.from_numpy, (entries, slot, places))
        )
        positions = runs(np.zeros_like(lengths), lengths)
        hidden = self._model.hidden(torch.from_numpy(ids)[None], torch.from_numpy(positions)[None], attend)[0]
        last = torch.from_numpy(at + self._lengths[prompts] - 1)
        return self._model.logits(hidden[last])[torch.from_numpy(which)]

    def _record(self, first: int, logits: Tensor, version: int) -> None:
        """Draw the next token of the slots from `first` on."""
        here = slice(first, first + len(logits))
        self._place[here] += 1
        place = self._place[here]
        numbers = self._request.numbers[self._row[here]]
        tokens, logprobs = self._draw(logits, numbers, place - self._prompt[here])
        slots = np.arange(here.start, here.stop)
        self._tokens[slots, place] = tokens.numpy()
        self._logprobs[slots, place] = logprobs.numpy()
        self._versions[slots, place] = version

    def _retire(self) -> None:
        """Rows that ended leave, and the last rows take their slots."""
        count = self._count
        place = self._place[:count]
        ended = np.isin(self._tokens[np.arange(count), place], self._ends)
        if self._request.stop:
            ended |= self._stopped()
        done = ended | (place + 1 >= self._end[:count])
        if not done.any():
            return
        slots = np.flatnonzero(done)
        lengths = place[slots] + 1
        flat = runs(slots * self._tokens.shape[1], lengths)
        self._finished.append(
            Finished(
                rows=self._row[slots],
                lengths=lengths,
                prompts=self._prompt[slots],
                truncated=~ended[slots],
                tokens=self._tokens.reshape(-1)[flat],
                logprobs=self._logprobs.reshape(-1)[flat],
                versions=self._versions.reshape(-1)[flat],
            )
        )
        self._count -= len(slots)
        holes = slots[slots < self._count]
        if len(holes):
            self._move(np.flatnonzero(~done[self._count :]) + self._count, holes)

    def _move(self, source: Ints, target: Ints) -> None:
        longest = int(self._place[source].max()) + 1
        for state in (self._row, self._prompt, self._place, self._end, self._tokens, self._logprobs, self._versions):
            state[target] = state[source]
        self._cache.move(torch.from_numpy(source), torch.from_numpy(target), longest)

    def _stopped(self) -> NDArray[np.bool_]:
        """Whether a stop text has appeared at the end of each row in a slot, bool[count]."""
        # A character is at most four bytes, and a token at least one: older tokens are of no stop text that is new.
        reach = 4 * max(map(len, self._request.stop)) + 4
        spans = zip(self._tokens, self._prompt[: self._count].tolist(), self._place.tolist(), strict=False)
        tails = [tokens[max(prompt, last + 1 - reach) : last + 1].tolist() for tokens, prompt, last in spans]
        texts = decode(self._model.tokenizer, tails)
        return np.array([any(stop in text for stop in self._request.stop) for text in texts], np.bool_)

    def _reserve(self, positions: int) -> None:
        """Room for this many tokens in each slot."""
        room = self._tokens.shape[1]
        if positions > room:
            room = -(-max(positions, room + room // 2) // GROWTH) * GROWTH
            more = ((0, 0), (0, room - self._tokens.shape[1]))
            self._tokens = np.pad(self._tokens, more)
            self._logprobs = np.pad(self._logprobs, more)
            self._versions = np.pad(self._versions, more)
        self._cache.reserve(room)
