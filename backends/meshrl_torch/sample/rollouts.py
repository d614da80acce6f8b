"""The common part of all samplers: rows to token sequences to continue, and decoded tokens to rollouts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data import (
    CONSTRAINT,
    FINGERPRINTS,
    MASKED,
    UNREPEATED,
    Batch,
    Images,
    Ragged,
    Source,
    adapters_of,
    masked_text,
    read_constraint,
)
from meshrl.errors import DataError
from meshrl.mesh import Array
from meshrl.roles import Sampling
from meshrl_torch.model.adapted import Names
from meshrl_torch.model.decoding import TAIL, completion_texts, decode, opened_in
from meshrl_torch.model.packing import runs
from meshrl_torch.model.routing import COLUMN
from meshrl_torch.model.rows import observed
from meshrl_torch.model.text import Words, encode_prompts, images_in, messages_of, prompts_of
from meshrl_torch.model.vision import images_of

Ints = NDArray[np.int64]

_PREFIX: Final = ("tokens", "loss_mask", "sampler_logprobs", "versions")
"""Columns of rows that are to be continued."""
_BY_ROW: Final = ("prefix", "rows", "starts", "limits", "numbers", "adapters", "constraints")
"""Fields of a request with a value for each row."""
_NEWEST: Final = np.iinfo(np.int32).max


def lengths_of(rows: Sequence[Sequence[int]]) -> Ints:
    """Return the length of each row, int64[rows]."""
    return np.fromiter(map(len, rows), np.int64, len(rows))


@dataclass(frozen=True)
class Request:
    """The rows that one call of `generate` has to decode."""

    prefixes: Sequence[Sequence[int]]
    """Distinct token sequences, each with at least one token: prompts, and started completions."""
    prefix: Ints
    """The prefix that each row continues, int64[rows]. Rows of one prefix should be adjacent."""
    rows: Ints
    """Names of the rows, int64[rows]."""
    starts: Ints
    """Tokens of each row's prompt, int64[rows], which is where its completion starts."""
    limits: Ints
    """Most tokens of each row's completion, int64[rows]."""
    numbers: Ints
    """Numbers that determine each row's random numbers, int64[rows]."""
    adapters: Names
    """The adapter of each row by name, which is that of its prefix too."""
    constraints: NDArray[np.object_]
    """The text of each row's constraint, "" for none."""
    ends: frozenset[int]
    """The tokens that end a row."""
    stop: tuple[str, ...]
    images: Images | None = None
    """Those of each prefix. None: no prefix has any."""

    @cached_property
    def lengths(self) -> Ints:
        """Lengths of the prefixes, int64[prefixes]."""
        return lengths_of(self.prefixes)

    def select(self, rows: NDArray[np.bool_] | Ints) -> "Request":
        """Select some rows, bool[rows], or by their numbers."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _BY_ROW})

    def joined(self, other: "Request") -> "Request":
        """Append the rows of another request."""
        both: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in _BY_ROW}
        both["prefix"][len(self.rows) :] += len(self.prefixes)
        images: Images | None = None
        if self.images is not None or other.images is not None:
            each = [own.images or Images([()] * len(own.prefixes), {}) for own in (self, other)]
            images = Images.joined(each)
        return replace(self, prefixes=[*self.prefixes, *other.prefixes], images=images, **both)


@dataclass(frozen=True)
class Finished:
    """Rows that are finished, or were stopped. Token arrays are flat, [sum of lengths], with the prompts.

    The tokens that a row had at its start, its prefix, have log-probs of 0 and versions of -1.
    """

    rows: Ints
    lengths: Ints
    prompts: Ints
    """Tokens of each row's prompt."""
    truncated: NDArray[np.bool_]
    aborted: NDArray[np.bool_]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    experts: NDArray[np.int16] = field(default_factory=lambda: np.empty((0, 0, 0), np.int16))
    """[sum of lengths, layers, experts of a token]. 0 layers if experts are not recorded."""


def versions_of(adapters: Names, versions: Mapping[str, int]) -> Ints:
    """Return the version of each row's adapter, int64[rows], given those of all by name."""
    names, number = np.unique(adapters, return_inverse=True)
    return np.array([versions[str(name)] for name in names], np.int64)[number]


def unread(request: Request, rows: Ints, routed: tuple[int, ...]) -> Finished:
    """Return rows of a request by their numbers, as they are if they are aborted before they are decoded."""
    prefixes = [request.prefixes[prefix] for prefix in request.prefix[rows].tolist()]
    lengths = lengths_of(prefixes)
    tokens = np.fromiter(chain.from_iterable(prefixes), np.int32, lengths.sum())
    return Finished(
        rows=request.rows[rows],
        lengths=lengths,
        prompts=request.starts[rows],
        truncated=np.zeros(len(rows), np.bool_),
        aborted=np.ones(len(rows), np.bool_),
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), -1, np.int32),
        experts=np.full((len(tokens), *routed), -1, np.int16),
    )


class Rollouts:
    """The rows of one call of `generate`: the request to decode, and the batches of results."""

    def __init__(
        self,
        words: Words,
        prompts: Batch,
        sampling: Sampling,
        routed: tuple[int, int] = (0, 0),
        adapters: Collection[str] = (),
        *,
        is_repeated: bool = False,
        sees: bool = False,
    ) -> None:
        """Raises DataError for a row that cannot be read, is too long with all its new tokens, or names no adapter.

        `sees`: the sampler takes images. DataError for rows with images otherwise.
        `routed`: number of layers that route, and of experts for each token, if experts are recorded. `adapters`: those
        that rows may name. `is_repeated`: trainers repeat the masks of constraints.
        """
        self._words = words
        self._routed = routed
        self._sampling = sampling
        self._is_repeated = is_repeated
        rows = prompts.repeat(sampling.n)
        had: object = None
        if COLUMN in rows:
            had, rows = rows[COLUMN], rows.drop(COLUMN)
        self._continued = all(name in rows for name in _PREFIX)
        self._answered = self._continued and "observation" in rows
        self._full = np.zeros(len(rows), np.bool_)
        if self._answered:
            rows, self._full = observed(words, rows)
        if self._continued and routed[0]:
            rows = rows.assign(**{COLUMN: _lengthened(had, rows.tokens, routed)})
        images = images_of(rows)
        self._images: Images | None = images if images and any(images) else None
        if self._images is not None and not sees:
            row = next(row for row, names in enumerate(self._images) if names)
            raise DataError(
                f"{rows.place(row)} has images, and this sampler passes none on to its engine: set "
                'sampler.backend = "torch"'
            )
        self._adapters: Names = np.array(adapters_of(rows, adapters), np.str_)
        self._constraints = _constraints(rows, sampling)
        self.rows = rows
        """`n` rows for each prompt."""
        request, ended = self._read()
        self.request: Final = request
        """The rows to decode."""
        self.ended: Final = ended
        """The rows that have ended already."""

    def batch(self, finished: Finished, versions: Mapping[str, int]) -> Batch:
        """Return finished rows. `versions` of the adapters are for rows without a new token."""
        rows = self.rows.select(finished.rows)
        offsets = np.append(0, np.cumsum(finished.lengths))
        place = np.arange(len(finished.tokens)) - np.repeat(offsets[:-1], finished.lengths)
        new = place >= np.repeat(finished.prompts, finished.lengths)
        if self._continued:
            had = runs(offsets[:-1], rows.tokens.lengths)
            finished.logprobs[had] = rows.sampler_logprobs.values
            finished.versions[had] = rows.versions.values
        oldest = versions_of(self._adapters[finished.rows], versions).astype(np.int32)
        begun = finished.lengths > finished.prompts
        oldest[begun] = np.minimum.reduceat(np.where(new, finished.versions, _NEWEST), offsets[:-1])[begun]
        prompts, sampled = _split(finished.tokens, offsets, finished.prompts)
        is_own = self._continued or self._words.chat is None  # no template opens what the prompt's text ends with
        given = rows.objects("prompt") if is_own and "prompt" in rows and len(rows) else [""] * len(rows)
        opened = opened_in(self._words, prompts, [each if isinstance(each, str) else "" for each in given])
        texts = completion_texts(self._words, sampled, prompts, self.request.ends, self._sampling.stop)
        more: dict[str, Ragged | list[tuple[str, ...]]] = {}
        if self._routed[0]:
            more[COLUMN] = Ragged(finished.experts, offsets, source=Source("sampler"))
        if self._images is not None and self._words.vision is not None:
            more[FINGERPRINTS] = self._words.vision.fingerprints(self._images.take(finished.rows))
        return rows.assign(
            **self._masked(finished),
            tokens=Ragged(finished.tokens, offsets),
            loss_mask=Ragged(new, offsets),
            sampler_logprobs=Ragged(finished.logprobs, offsets, source=Source("sampler")),
            versions=Ragged(finished.versions, offsets),
            oldest_version=oldest,
            completion=[tag + text for tag, text in zip(opened, texts, strict=True)],
            temperature=np.full(len(rows), self._sampling.temperature or 1.0, np.float32),
            truncated=finished.truncated,
            aborted=finished.aborted,
            **more,
        )

    def _masked(self, finished: Finished) -> Mapping[str, Sequence[str | None]]:
        """Return what was drawn under which mask, if rows may have constraints."""
        if CONSTRAINT not in self.rows:
            return {}
        texts = self._constraints[finished.rows].tolist()
        kept = [text if self._is_repeated else UNREPEATED for text in texts]
        places = zip(texts, finished.prompts.tolist(), finished.lengths.tolist(), kept, strict=True)
        return {MASKED: [masked_text([(*span, own)] if text else []) for text, *span, own in places]}

    def _read(self) -> tuple[Request, Finished]:
        rows, sampling = self.rows, self._sampling
        prefixes, prefix, starts = self._prefixes() if self._continued else self._prompts()
        lengths = lengths_of(prefixes)[prefix]
        own = rows.row("max_tokens") if "max_tokens" in rows else sampling.max_tokens
        limits = np.broadcast_to(np.asarray(own, np.int64), len(rows))
        if len(limits) and limits.min() < 1:
            row = int(limits.argmin())
            raise DataError(f"`max_tokens` of {rows.place(row)} is {limits[row]}: a completion needs at least 1 token")
        if self._answered:
            limits = np.minimum(limits, self._words.room(lengths) - starts)
        totals = np.maximum(starts + limits, lengths)
        if len(totals):
            row = int(totals.argmax())
            self._words.check_lengths(int(totals[row]), f"{rows.place(row)} with {limits[row]} new tokens (max_tokens)")
        numbers = rows.origins[-1] if rows.origins else np.arange(len(rows))
        if len(np.unique(numbers)) != len(numbers):  # rows repeated since the split must not sample equally
            numbers = np.arange(len(rows))
        stops = self._words.stops(sampling)
        names = np.arange(len(rows))
        images = None if self._images is None else self._images.take(np.unique(prefix, return_index=True)[1])
        request = Request(
            prefixes,
            prefix,
            names,
            starts,
            limits,
            numbers,
            self._adapters,
            self._constraints,
            stops,
            sampling.stop,
            images,
        )
        if not self._continued or not len(rows):
            self._check_growth(request)
            return request, unread(request, np.arange(0), self._routed)
        stopped = self._stopped(request)
        done = stopped | self._full | (lengths - starts >= limits)
        left = request.select(~done)
        self._check_growth(left)
        return left, _ended(rows, np.flatnonzero(done), starts, ~stopped)

    def _check_growth(self, request: Request) -> None:
        """Raise DataError if a row may grow past the model's native length, which changes all of its positions."""
        native, had = self._words.native_tokens, request.lengths[request.prefix]
        totals = request.starts + request.limits
        grows = np.flatnonzero((had < native) & (totals > native))
        if len(grows):
            row = int(grows[0])
            where = self.rows.place(int(request.rows[row]))
            raise DataError(
                f"{where} has {had[row]} tokens and may get {totals[row]}, and this model (LongRoPE) "
                f"has other positions in rows of more than {native}: its first tokens would be drawn with positions "
                f"that the policy does not train with. Lower sampling.max_tokens, so that prompt and completion are at "
                f"most {native} tokens, or set short_factor to the values of long_factor in the model's config.json"
            )

    def _prompts(self) -> tuple[list[list[int]], Ints, Ints]:
        """Return the distinct prompts, the number of each row's prompt, and its length."""
        prompts = prompts_of(self.rows, self._words.chat)
        if self._images is not None:  # the column may have those of other texts, too
            names = [images_in(messages_of(prompt)) for prompt in prompts]
            self._images = Images(names, self._images.pool)
            self.rows = self.rows.assign(images=self._images)
        keys = list(zip(map(repr, prompts), self._adapters.tolist(), strict=True))
        different = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        prompt = np.fromiter(map(different.__getitem__, keys), np.int64, len(keys))
        firsts = np.unique(prompt, return_index=True)[1].tolist()
        places = [self.rows.place(row) for row in firsts]
        ids = encode_prompts(self._words, [prompts[row] for row in firsts], self._images, places)
        for tokens, row in zip(ids, firsts, strict=True):
            self._words.check_known(tokens, self.rows.place(row))
        return ids, prompt, lengths_of(ids)[prompt]

    def _prefixes(self) -> tuple[list[list[int]], Ints, Ints]:
        """Return the distinct token sequences to continue, that of each row, and the starts of completions."""
        rows = self.rows
        empty = np.flatnonzero(rows.tokens.lengths == 0)
        if len(empty):
            raise DataError(
                f"row {empty[0]} cannot be continued: it has no `tokens`. Give its prompt's tokens, or drop the "
                f"columns {', '.join(_PREFIX)} to start all rows from their prompts"
            )
        different: dict[tuple[bytes, str, tuple[str, ...]], int] = {}
        tokens = [row.astype(np.int32).tobytes() for row in rows.tokens]
        keys = zip(tokens, self._adapters.tolist(), self._images or [()] * len(rows), strict=True)
        prefix = np.fromiter((different.setdefault(key, len(different)) for key in keys), np.int64, len(rows))
        prefixes = [np.frombuffer(each, np.int32).tolist() for each, *_ in different]
        starts = [int(mask.argmax()) if mask.any() else len(mask) for mask in rows.loss_mask]
        for row in np.flatnonzero(self._constraints != "").tolist():
            if not rows.loss_mask[row][starts[row] :].all():
                raise DataError(
                    f"{rows.place(row)} has a `{CONSTRAINT}` and more than one answer: a constraint holds for one, so "
                    "tasks of several turns cannot have it. An agent asks for it turn by turn"
                )
        return prefixes, prefix, np.array(starts, np.int64)

    def _stopped(self, request: Request) -> NDArray[np.bool_]:
        """True for each row whose completion has an end already, bool[rows]."""
        values, offsets = self.rows.tokens.values, self.rows.tokens.offsets
        begun = self.rows.tokens.lengths > request.starts
        stopped = begun & np.isin(values[offsets[1:] - 1], sorted(request.ends))
        if request.stop:
            prompts, sampled = _split(values, offsets, request.starts)
            texts = decode(self._words, sampled, prompts)
            stopped |= np.array([any(stop in text for stop in request.stop) for text in texts], np.bool_)
        return stopped


def _constraints(rows: Batch, sampling: Sampling) -> NDArray[np.object_]:
    """Return the text of each row's constraint, "" for none. DataError if answers would continue after their end."""
    given = rows.objects(CONSTRAINT) if CONSTRAINT in rows else (None,) * len(rows)
    texts = ["" if text is None else read_constraint(text, rows.place(row)).text for row, text in enumerate(given)]
    if sampling.ignore_eos and any(texts):
        raise DataError(f"sampling.ignore_eos: an answer with a `{CONSTRAINT}` ends where that says: set it to false")
    return np.array(texts, np.object_)


def _ended(rows: Batch, which: Ints, starts: Ints, truncated: NDArray[np.bool_]) -> Finished:
    """Return these rows as they are."""
    some = rows.select(which)
    experts = {"experts": cast("Ragged", some[COLUMN]).values.astype(np.int16)} if COLUMN in some else {}
    return Finished(
        rows=which,
        lengths=some.tokens.lengths,
        prompts=starts[which],
        truncated=truncated[which],
        aborted=np.zeros(len(which), np.bool_),
        tokens=some.tokens.values.astype(np.int32),
        logprobs=some.sampler_logprobs.values.astype(np.float32),
        versions=some.versions.values.astype(np.int32),
        **experts,
    )


def _lengthened(had: object, tokens: Ragged, routed: tuple[int, int]) -> Ragged:
    """Extend the experts `had` of rows: -1 for later tokens, and for all tokens if they are of another model."""
    values = np.full((len(tokens.values), *routed), -1, np.int16)
    if isinstance(had, Ragged) and had.values.shape[1:] == routed:
        values[runs(tokens.offsets[:-1], had.lengths)] = had.values
    return Ragged(values, tokens.offsets)


def _split(tokens: Array, offsets: Ints, starts: Ints) -> tuple[list[list[int]], list[list[int]]]:
    """Return the last tokens of each prompt, and the completions."""
    begins = (offsets[:-1] + starts).tolist()
    prompts = zip(offsets[:-1].tolist(), begins, strict=True)
    sampled = [tokens[begin:end].tolist() for begin, end in zip(begins, offsets[1:].tolist(), strict=True)]
    return [tokens[max(start, end - TAIL) : end].tolist() for start, end in prompts], sampled
