"""Tasks: the source of prompts, which of them are held out, and how they are drawn in batches."""

import hashlib
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch
from meshrl.errors import DataError, did_you_mean
from meshrl.tasks.config import TaskConfig
from meshrl.tasks.cursor import DataCursor, Deal, data_cursor
from meshrl.tasks.lengths import short_enough
from meshrl.tasks.sources import Row, numbered_rows, read_rows


class _Filled(NamedTuple):
    """A row, and the texts that the templates make from it."""

    row: Row
    answer: str
    messages: list[Mapping[str, str]]


@dataclass(frozen=True)
class Task:
    """Prompts for training and evaluation, with the columns `prompt`, `answer` and `row` (the source's row).

    With `TaskConfig.dialogues` there is also `messages`, lists of `{"role": ..., "content": ...}`.
    """

    train: Batch
    held_out: Batch

    @classmethod
    def load(cls, config: TaskConfig) -> "Task":
        """Read the source, drop repeated prompts, and separate the held-out ones."""
        return cls._made(config, read_rows(config))

    @classmethod
    def of(
        cls,
        rows: Iterable[Mapping[str, object]],
        *,
        prompt: str = "{question}",
        answer: str = "{answer}",
        held_out: int | Literal["all"] = 0,
        held_out_fraction: float = 0.1,
    ) -> "Task":
        """Make a task from rows in memory: a list, or a dataset whose rows are mappings. Options: see `TaskConfig`.

        Task.of([{"question": "2 + 2", "answer": "4"}])
        """
        config = TaskConfig(
            source="rows", prompt=prompt, answer=answer, held_out=held_out, held_out_fraction=held_out_fraction
        )
        return cls._made(config, numbered_rows(rows))

    @classmethod
    def _made(cls, config: TaskConfig, found: Iterable[tuple[str, Row]], *, quiet: bool = False) -> "Task":
        every: dict[str, _Filled] = {}
        for where, row in found:
            prompt = fill_prompt(config, row, where)
            if prompt not in every:
                answer = fill_answer(config, row, where)
                every[prompt] = _Filled(row, answer, dialogue(config, len(every), row, where))
        rows = short_enough(config, every, quiet=quiet)
        # A hash of the prompt decides, so another order, size or seed of the source moves no prompt between the parts.
        places = {prompt: _place(prompt) for prompt in rows}
        apart = sorted(
            (prompt for prompt in rows if config.held_out and places[prompt] < config.held_out_fraction),
            key=places.__getitem__,
        )
        wanted = len(apart) if config.held_out == "all" else config.held_out
        if len(apart) < wanted:
            raise DataError(
                f"{config.source}: held_out = {wanted}, but held_out_fraction = "
                f"{config.held_out_fraction} of its {len(rows)} different prompts sets only {len(apart)} apart: set "
                'task.held_out = "all" to hold out these, or raise task.held_out_fraction'
            )
        train = [prompt for prompt in rows if not config.held_out or places[prompt] >= config.held_out_fraction]
        if not train:
            raise DataError(f"{config.source}: no prompt is left to train on: all {len(rows)} are held out")
        return cls(train=_batch(rows, train), held_out=_batch(rows, apart[:wanted]))

    def batches(self, rows: int, seed: int) -> Iterator[Batch]:
        """Yield batches of `rows` training prompts forever. Each epoch has a new order, which `seed` decides.

        Adds `groups`, int64: a number for each drawn prompt, which is never used twice in a run. A resumed run skips
        the prompts that were used before its checkpoint. Raises DataError for fewer than one row.
        """
        if rows < 1:
            raise DataError(f"batches of {rows} rows: ask for at least 1")
        here = data_cursor.get()
        first = here.deal(Deal(len(self.train), self._digest(), seed)) if here else 0
        return self._deal(rows, seed, first, here)

    def _deal(self, rows: int, seed: int, first: int, here: DataCursor | None) -> Iterator[Batch]:
        size = len(self.train)

        @lru_cache(maxsize=2)
        def order(epoch: int) -> NDArray[np.int64]:
            return np.random.default_rng([seed, epoch]).permutation(size)

        end = first
        while True:
            numbers = np.empty(0, np.int64)
            while len(numbers) < rows:
                fresh = np.arange(end, end + rows - len(numbers), dtype=np.int64)
                end += len(fresh)
                numbers = np.concatenate([numbers, fresh[here.left(fresh)] if here else fresh])
            if here:
                here.use(numbers)
            places = (divmod(number - first, size) for number in numbers.tolist())
            yield self.train.select([order(epoch)[place] for epoch, place in places]).assign(groups=numbers)

    def _digest(self) -> str:
        prompts = hashlib.blake2b(digest_size=8)
        for prompt in self.train.objects("prompt"):
            prompts.update(f"{prompt}\0".encode())
        return prompts.hexdigest()


def load_quietly(config: TaskConfig) -> Task:
    """Load a task like `Task.load`, without logging what is left out."""
    return Task._made(config, read_rows(config), quiet=True)  # noqa: SLF001 -- of this module


def first_row(config: TaskConfig) -> tuple[str, str, Row]:
    """Return the prompt and the answer of a task's first row, and the row. DataError if a template does not fit."""
    where, row = next(iter(read_rows(config, rows=1)))
    return fill_prompt(config, row, where), fill_answer(config, row, where), row


def dialogue(config: TaskConfig, number: int, row: Mapping[str, object], where: str) -> list[Mapping[str, str]]:
    """Return the messages of the row with this number. DataError if a template does not fit."""
    if not config.dialogues:
        return []
    return [
        {"role": each.role, "content": fill(each.content, row, f"{where}: message {at}")}
        for at, each in enumerate(config.dialogues[number % len(config.dialogues)])
    ]


def fill_prompt(config: TaskConfig, row: Mapping[str, object], where: str) -> str:
    """Return a row's prompt. DataError if the template does not fit, or puts whole messages into the text."""
    prompt = fill(config.prompt, row, f"{where}: prompt", "set task.prompt to a template over these keys")
    for _, key, _, _ in _parsed(config.prompt):
        value = row.get(key) if key else None
        if isinstance(value, list) and value and all(map(_is_message, value)):
            raise DataError(
                f"{where}: prompt: `{key}` is a list of messages: write {{{key}[{len(value) - 1}][content]}}, with "
                "policy.chat = true"
            )
        if _is_message(value):
            raise DataError(f"{where}: prompt: `{key}` is a message: write {{{key}[content]}}, with policy.chat = true")
    return prompt


def fill_answer(config: TaskConfig, row: Mapping[str, object], where: str) -> str:
    """Return a row's answer. DataError if the template does not fit."""
    remedy = 'set task.answer to a template over these keys, or to "" if nothing reads the answer'
    return fill(config.answer, row, f"{where}: answer", remedy)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "content" in value


def fill(template: str, row: Mapping[str, object], where: str, remedy: str = "") -> str:
    """Fill a template with the row's values.

    Raises DataError, which names `where`, if the template does not fit the row or the row lacks a key. `remedy`: what
    to do about the latter.
    """
    try:
        if (pieces := _pieces(template)) is None:
            return _FORMATTER.vformat(template, (), row)
        return "".join([f"{text}{'' if key is None or (value := row[key]) is None else value}" for text, key in pieces])
    except KeyError as error:
        key = str(error.args[0])
        hint = did_you_mean(key, row) or f"it has {', '.join(map(repr, row))}" + (remedy and f": {remedy}")
        raise DataError(f"{where}: the template {template!r} needs {key!r}, which the row lacks; {hint}") from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise DataError(
            f"{where}: the template {template!r} does not fit the row: {error}. "
            "Write {key} or {key[inner]}, and {{ and }} for braces"
        ) from error


_Piece = tuple[str, str | None, str | None, str | None]


class _Template(string.Formatter):
    def format_field(self, value: object, format_spec: str) -> str:
        return "" if value is None else cast("str", super().format_field(value, format_spec))

    def parse(self, format_string: str) -> Sequence[_Piece]:
        return _parsed(format_string)


@cache
def _parsed(template: str) -> Sequence[_Piece]:
    return list(string.Formatter().parse(template))


_FORMATTER = _Template()


@cache
def _pieces(template: str) -> Sequence[tuple[str, str | None]] | None:
    """Split a template with plain keys into texts, each with the key after it. None for others, which fill slowly."""
    pieces = _parsed(template)
    is_plain = all(key is None or (key.isidentifier() and not form and not convert) for _, key, form, convert in pieces)
    return [(text, key) for text, key, _, _ in pieces] if is_plain else None


def _place(prompt: str) -> float:
    """Return a number in [0, 1) that depends only on the prompt."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest()) / 2**64


def _batch(rows: Mapping[str, _Filled], prompts: list[str]) -> Batch:
    some = [rows[prompt] for prompt in prompts]
    batch = Batch.of(prompt=list(prompts), answer=[each.answer for each in some], row=[each.row for each in some])
    return batch.assign(messages=[each.messages for each in some]) if some and some[0].messages else batch
