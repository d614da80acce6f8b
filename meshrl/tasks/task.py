"""Tasks: the source of prompts, which of them are held out, and how they are drawn in batches."""

import hashlib
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshrl import log
from meshrl.data import Batch
from meshrl.errors import ConfigError, DataError, did_you_mean
from meshrl.roles import count_tokens
from meshrl.tasks.cursor import DataCursor, Deal, data_cursor
from meshrl.tasks.sources import Row, TaskConfig, numbered_rows, read_rows


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
        return _task(config, read_rows(config))

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
        return _task(config, numbered_rows(rows))

    def batches(self, rows: int, seed: int) -> Iterator[Batch]:
        """Yield batches of `rows` training prompts forever. Each epoch has a new order, which `seed` decides.

        Adds `groups`, int64: a number for each drawn prompt, which is never used twice in a run. A resumed run skips
        the prompts that were used before its checkpoint. Raises DataError for fewer than one row.
        """
        if rows < 1:
            raise DataError(f"batches of {rows} rows: ask for at least 1")
        cursor = data_cursor.get()
        first = cursor.deal(Deal(len(self.train), self._digest(), seed)) if cursor else 0
        return self._batches(rows, seed, first, cursor)

    def _batches(self, rows: int, seed: int, first: int, cursor: DataCursor | None) -> Iterator[Batch]:
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
                numbers = np.concatenate([numbers, fresh[cursor.left(fresh)] if cursor else fresh])
            if cursor:
                cursor.use(numbers)
            places = (divmod(number - first, size) for number in numbers.tolist())
            yield self.train.select([order(epoch)[place] for epoch, place in places]).assign(groups=numbers)

    def _digest(self) -> str:
        prompts = hashlib.blake2b(digest_size=8)
        for prompt in self.train.objects("prompt"):
            prompts.update(f"{prompt}\0".encode())
        return prompts.hexdigest()


def load_quietly(config: TaskConfig) -> Task:
    """Load a task like `Task.load`, without logging what is left out."""
    return _task(config, read_rows(config), quiet=True)


def _task(config: TaskConfig, source: Iterable[tuple[str, Row]], *, quiet: bool = False) -> Task:
    """Make a task of rows and their places. `quiet`: do not log what is left out."""
    every: dict[str, _Filled] = {}
    for where, row in source:
        prompt = fill_prompt(config, row, where)
        if prompt not in every:
            answer = fill_answer(config, row, where)
            every[prompt] = _Filled(row, answer, dialogue(config, len(every), row, where))
    rows = _short_enough(config, every, quiet)
    # A hash of the prompt decides, so another order, size or seed of the source moves no prompt between the parts.
    places = {prompt: text_hash(prompt) / 2**64 for prompt in rows}
    fraction = config.held_out_fraction if config.held_out else 0
    apart = sorted((prompt for prompt in rows if places[prompt] < fraction), key=places.__getitem__)
    wanted = len(apart) if config.held_out == "all" else config.held_out
    if len(apart) < wanted:
        raise DataError(
            f"{config.source}: held_out = {wanted}, but held_out_fraction = "
            f"{config.held_out_fraction} of its {len(rows)} different prompts sets only {len(apart)} apart: set "
            'task.held_out = "all" to hold out these, or raise task.held_out_fraction'
        )
    train = [prompt for prompt in rows if places[prompt] >= fraction]
    if not train:
        raise DataError(f"{config.source}: no prompt is left to train on: all {len(rows)} are held out")
    return Task(train=_batch(rows, train), held_out=_batch(rows, apart[:wanted]))


def _short_enough(config: TaskConfig, rows: Mapping[str, _Filled], quiet: bool) -> Mapping[str, _Filled]:
    """Drop rows whose prompt has more than `config.max_prompt_tokens` tokens. DataError if none is left."""
    if config.max_prompt_tokens is None:
        return rows
    counts = zip(rows, counted(config, list(rows)), strict=True)
    short = [prompt for prompt, count in counts if isinstance(count, str) or count <= config.max_prompt_tokens]
    if not short:
        raise DataError(
            f"{config.source}: each of its {len(rows)} prompts has more than "
            f"task.max_prompt_tokens = {config.max_prompt_tokens} tokens"
        )
    if (dropped := len(rows) - len(short)) and not quiet:
        log.info(
            f"{config.source}: {dropped} of {len(rows)} prompts are left out: they have more than "
            f"{config.max_prompt_tokens} tokens"
        )
    return {prompt: rows[prompt] for prompt in short}


def counted(config: TaskConfig, prompts: Sequence[str]) -> Sequence[int | str]:
    """Count tokens like `count_tokens`, with the reader for `config.max_prompt_tokens`. ConfigError if none can."""
    counts = count_tokens(config.reader, prompts) if config.reader else None
    if counts is None:
        raise ConfigError(
            f"task.max_prompt_tokens = {config.max_prompt_tokens}: there is no tokenizer to count tokens with: "
            "give the folder of a model, or remove task.max_prompt_tokens"
        )
    return counts


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


def text_hash(text: str) -> int:
    """Return a number below 2**64 that depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _batch(rows: Mapping[str, _Filled], prompts: list[str]) -> Batch:
    some = [rows[prompt] for prompt in prompts]
    batch = Batch.of(prompt=list(prompts), answer=[each.answer for each in some], row=[each.row for each in some])
    return batch.assign(messages=[each.messages for each in some]) if some and some[0].messages else batch
