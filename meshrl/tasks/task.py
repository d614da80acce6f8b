"""Tasks: the source of prompts, which of them are held out, and how they are drawn in batches."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrl import log
from meshrl.data import IMAGES, Batch, Images, Prompt, mark_of, names_in, prompt_in
from meshrl.errors import ConfigError, DataError
from meshrl.roles import count_tokens
from meshrl.tasks.cells import Answer, fill, fill_accepted, fitting, only_key, parsed
from meshrl.tasks.cursor import DataCursor, Deal, data_cursor
from meshrl.tasks.images import Album
from meshrl.tasks.sources import GENERATORS, Row, TaskConfig, numbered_rows, read_rows

_WHY: Final = {
    "repeated": "the generator had drawn them before",
    "too_long": "they have more than {most} tokens",
    "set_apart": "task.held_out_fraction = {share} sets more apart than task.held_out = {wanted}",
}


class _Filled(NamedTuple):
    """A row, and the texts that the templates make from it."""

    where: str
    row: Row
    prompt: Prompt
    answer: Answer
    messages: list[Mapping[str, str]]
    images: Sequence[str] = ()
    """The names of those in its texts."""

    @property
    def text(self) -> str:
        """The prompt as text, which decides the part that it is in."""
        return self.prompt if isinstance(self.prompt, str) else repr(self.prompt)


@dataclass(frozen=True)
class Task:
    """Prompts for training and evaluation, with the columns `prompt`, `answer`, `row` (the source's row) and `place`.

    `place` names the row in its source, as in "rows.jsonl, line 9". A prompt is a text, or a list of messages. With
    `TaskConfig.images` there is `images` (`data.Images`), whose names stand in the texts.

    With `TaskConfig.dialogues` there is also `messages`, lists of `{"role": ..., "content": ...}`.
    """

    train: Batch
    held_out: Batch
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of rows in neither part: `repeated` prompts of a generator, prompts that are `too_long`, and those
    that are `set_apart` for `held_out`, which takes fewer."""

    @classmethod
    def load(cls, config: TaskConfig) -> "Task":
        """Read the source, and separate the held-out prompts. Rows with equal prompts stay rows, in the same part."""
        return _task(config, read_rows(config))

    @classmethod
    def of(
        cls,
        rows: Iterable[Mapping[str, object]],
        *,
        prompt: str = "{question}",
        answer: str = "{answer}",
        images: Sequence[str] = (),
        held_out: int | Literal["all"] = 0,
        held_out_fraction: float = 0.1,
    ) -> "Task":
        """Make a task from rows in memory: a list, or a dataset whose rows are mappings. Options: see `TaskConfig`.

        Task.of([{"question": "2 + 2", "answer": "4"}])
        """
        config = TaskConfig(
            source="rows",
            prompt=prompt,
            answer=answer,
            images=tuple(images),
            held_out=held_out,
            held_out_fraction=held_out_fraction,
        )
        return _task(config, numbered_rows(rows, config.images))

    def batches(self, rows: int, seed: int) -> Iterator[Batch]:
        """Yield batches of `rows` training prompts forever. Each epoch has a new order, which `seed` decides.

        Adds `groups`, int64: a number for each drawn prompt, which is never used twice in a run. A resumed run skips
        the prompts that were used before its checkpoint. Raises DataError for fewer than one row.
        """
        if rows < 1:
            raise DataError(f"batches of {rows} rows: ask for at least 1")
        cursor = data_cursor.get()
        first = cursor.deal(Deal(len(self.train), self._digest(), seed), self.left_out) if cursor else 0
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
    filled: dict[object, _Filled] = {}
    count, album = 0, _album(config)
    for where, row in source:
        each = _filled(config, album, len(filled), where, row)
        filled.setdefault(repr(each.prompt) if config.source.startswith(GENERATORS) else count, each)
        count += 1
    rows = _short_enough(config, album, [*filled.values()])
    # A hash of the prompt decides, so another order, size or seed of the source moves no prompt between the parts.
    places = {each.text: text_hash(each.text) / 2**64 for each in rows}
    fraction = config.held_out_fraction if config.held_out else 0
    apart = sorted((prompt for prompt, place in places.items() if place < fraction), key=places.__getitem__)
    wanted = len(apart) if config.held_out == "all" else config.held_out
    if len(apart) < wanted:
        raise DataError(
            f"{config.source}: held_out = {wanted}, but held_out_fraction = "
            f"{config.held_out_fraction} of its {len(places)} different prompts sets only {len(apart)} apart: set "
            'task.held_out = "all" to hold out these, or raise task.held_out_fraction'
        )
    train = [each for each in rows if places[each.text] >= fraction]
    if not train:
        raise DataError(f"{config.source}: no prompt is left to train on: all {len(places)} are held out")
    chosen = set(apart[:wanted])
    held_out = sorted((each for each in rows if each.text in chosen), key=lambda each: places[each.text])
    left_out = {
        "repeated": count - len(filled),
        "too_long": len(filled) - len(rows),
        "set_apart": len(rows) - len(train) - len(held_out),
    }
    task = Task(_batch(train, album), _batch(held_out, album), {why: some for why, some in left_out.items() if some})
    for why, some in task.left_out.items() if not quiet else ():
        log.info(
            f"{config.source}: {some:,} of {count:,} prompts are left out: "
            + _WHY[why].format(most=config.max_prompt_tokens, share=config.held_out_fraction, wanted=wanted)
        )
    return task


def _album(config: TaskConfig) -> Album:
    """Return an album for the images of a task."""
    is_file = not any(config.source.startswith(each) for each in ("hf:", "lm_eval:", "verifiers:", *GENERATORS))
    return Album(config.images, Path(config.source).parent if is_file else Path(), config.image_hosts)


def _short_enough(config: TaskConfig, album: Album, rows: Sequence[_Filled]) -> Sequence[_Filled]:
    """Drop rows whose prompt has more than `config.max_prompt_tokens` tokens. DataError if none is left."""
    if config.max_prompt_tokens is None:
        return rows
    counts = zip(rows, counted(config, _batch(rows, album)), strict=True)
    short = [each for each, count in counts if isinstance(count, str) or count <= config.max_prompt_tokens]
    if not short:
        raise DataError(
            f"{config.source}: each of its {len(rows)} prompts has more than "
            f"task.max_prompt_tokens = {config.max_prompt_tokens} tokens"
        )
    return short


def counted(config: TaskConfig, rows: Batch) -> Sequence[int | str]:
    """Count the tokens of prompts, with the reader for `config.max_prompt_tokens`. ConfigError if none can."""
    counts = count_tokens(config.reader, prompts_of(rows)) if config.reader else None
    if counts is None:
        raise ConfigError(
            f"task.max_prompt_tokens = {config.max_prompt_tokens}: there is no tokenizer to count tokens with: "
            "give the folder of a model, or remove task.max_prompt_tokens"
        )
    return counts


def prompts_of(rows: Batch) -> Batch:
    """Return the columns of a task's rows that prompts are made of."""
    return rows.only(*(name for name in ("prompt", "place", IMAGES) if name in rows))


def first_row(config: TaskConfig) -> tuple[Prompt, Answer, Row]:
    """Return the prompt and the answer of a task's first row, and the row. DataError if a template does not fit."""
    filled = _filled(config, _album(config), 0, *next(iter(read_rows(config, rows=1))))
    return filled.prompt, filled.answer, filled.row


def filled_rows(config: TaskConfig, rows: Iterable[tuple[str, Row]]) -> tuple[Batch, list[str]]:
    """Return rows as a task has them, none left out, and the mistakes of those that do not fit the templates."""
    filled: list[_Filled] = []
    mistakes: list[str] = []
    album = _album(config)
    for number, (where, row) in enumerate(rows):
        try:
            filled.append(_filled(config, album, number, where, row))
        except DataError as error:
            mistakes.append(str(error))
    return _batch(filled, album), mistakes


def _filled(config: TaskConfig, album: Album, number: int, where: str, given: Row) -> _Filled:
    """Fill the templates with the row of this number. DataError if one does not fit, or an image cannot be read."""
    row, names = album.named(given, where)
    prompt, remedy = (
        _prompt(config, album, row, names, where),
        'set task.answer to a template over these keys, or to "" if nothing',
    )
    answer = fill_accepted(config.answer, row, f"{where}: answer", f"{remedy} reads the answer")
    messages = _dialogue(config, number, row, where)
    texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt]
    shown = [name for text in (*texts, *(each["content"] for each in messages)) for name in names_in(text)]
    return _Filled(where, row, prompt, answer, messages, shown)


def _dialogue(config: TaskConfig, number: int, row: Row, where: str) -> list[Mapping[str, str]]:
    """Return the messages of the row with this number. DataError if a template does not fit."""
    if not config.dialogues:
        return []
    return [
        {"role": each.role, "content": fill(each.content, row, f"{where}: message {at}")}
        for at, each in enumerate(config.dialogues[number % len(config.dialogues)])
    ]


def _prompt(config: TaskConfig, album: Album, row: Row, names: Sequence[str], where: str) -> Prompt:
    """Return a row's prompt: a text, or all messages if the template is a key that has them.

    DataError if the template does not fit, puts messages into a text, or finds only null.
    """
    with fitting(config.prompt, row, f"{where}: prompt"):
        pieces = parsed(config.prompt)
    keys = [key for _, key, _, _ in pieces if key]
    for key in keys:
        value = row.get(key)
        messages = value if isinstance(value, list) else [value]
        if value and all(isinstance(each, Mapping) and "role" in each for each in messages):
            if only_key(config.prompt) == key:
                return _with_leading_images(
                    prompt_in(album.texts(messages, names, where), f"{where}: prompt: `{key}`"), names
                )
            raise DataError(
                f"{where}: prompt: `{key}` has messages, which are no text: write {{{key}}} alone for all of "
                f"them, with policy.chat = true, or {{{key}{'[0]' if messages is value else ''}[content]}}"
            )
    prompt = fill(config.prompt, row, f"{where}: prompt", "set task.prompt to a template over these keys")
    if keys and prompt.split() == "".join([text for text, _, _, _ in pieces]).split():
        raise DataError(
            f"{where}: the prompt is empty, as the row has nothing in {', '.join(keys)}: leave the row out, or set "
            "task.prompt to a template over other keys"
        )
    return _with_leading_images(prompt, names)


def _with_leading_images(prompt: Prompt, names: Sequence[str]) -> Prompt:
    """Put the images that no text of a prompt names before its text, or before that of the first user's message."""
    texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt]
    had = {name for text in texts for name in names_in(text)}
    before = "".join(mark_of(name) for name in names if name not in had)
    if not before or isinstance(prompt, str):
        return before + str(prompt) if before else prompt
    at = next((at for at, each in enumerate(prompt) if each["role"] == "user"), 0)
    return [{**each, "content": before + each["content"]} if at == own else each for own, each in enumerate(prompt)]


def text_hash(text: str) -> int:
    """Return a number below 2**64 that depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _batch(rows: Sequence[_Filled], album: Album) -> Batch:
    batch = Batch.of(
        prompt=[each.prompt for each in rows],
        answer=[each.answer for each in rows],
        row=[each.row for each in rows],
        place=[each.where for each in rows],
    )
    if album.pool:
        batch = batch.assign(images=Images([each.images for each in rows], album.pool))
    return batch.assign(messages=[each.messages for each in rows]) if rows and rows[0].messages else batch
