"""Tasks: where prompts come from, which of them are held out, and how they are dealt into batches."""

import hashlib
import itertools
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from meshrl import verifiers
from meshrl.config import Config, nearest
from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.position import Deal, Position, position

Row = dict[str, object]


class TaskConfig(Config):
    """Rows of data, and the templates that make a prompt and an answer of each."""

    source: str
    """`reasoning_gym:NAME`, `verifiers:ENV_ID`, or a .jsonl or .parquet file (from the folder where the command
    runs)."""
    options: Mapping[str, JsonValue] = Field(default={})
    """Of reasoning_gym: its own, such as `size` (here 10,000 unless told), `seed` (0) and the dataset's. Of verifiers:
    what the environment is loaded with."""
    prompt: str = "{question}"
    """`str.format` template over the row's keys; `{metadata[word]}` reaches into a table, `{{` is a brace."""
    answer: str = "{answer}"
    """The same. An answer that is null gives the empty text."""
    held_out: int = Field(default=512, ge=0)
    """Prompts that are never trained on; 0 trains on all."""
    held_out_fraction: float = Field(default=0.1, gt=0, lt=1)
    """The share of prompts that `held_out` is drawn from, by a hash of the prompt: the same in every run."""


@dataclass(frozen=True)
class Task:
    """Prompts to train on and to judge by. Columns: `prompt`, `answer`, `row` (the source's own row)."""

    train: Batch
    held_out: Batch

    @classmethod
    def load(cls, config: TaskConfig) -> "Task":
        """Read the source, drop repeated prompts, and set the held-out ones apart."""
        rows: dict[str, tuple[str, Row]] = {}
        for where, row in _read(config):
            prompt = fill(config.prompt, row, f"{where}: prompt")
            if prompt not in rows:
                rows[prompt] = fill(config.answer, row, f"{where}: answer"), row
        # Drawn by the prompt's own hash, so that another order, size or seed of the source moves none across.
        places = {prompt: _place(prompt) for prompt in rows}
        apart = sorted(
            (prompt for prompt in rows if config.held_out and places[prompt] < config.held_out_fraction),
            key=places.__getitem__,
        )
        if len(apart) < config.held_out:
            raise DataError(
                f"{config.source}: held_out = {config.held_out}, but held_out_fraction = "
                f"{config.held_out_fraction} of its {len(rows)} different prompts sets only {len(apart)} "
                "apart; lower held_out or raise held_out_fraction"
            )
        train = [prompt for prompt in rows if not config.held_out or places[prompt] >= config.held_out_fraction]
        if not train:
            raise DataError(f"{config.source}: no prompt is left to train on: all {len(rows)} are held out")
        return cls(train=_batch(rows, train), held_out=_batch(rows, apart[: config.held_out]))

    def batches(self, rows: int, seed: int) -> Iterator[Batch]:
        """Batches of `rows` training prompts without end, each epoch in a new order that `seed` decides.

        Adds `groups`, int64: a number for each prompt drawn, never used twice in a run. In the loop of a run that goes
        on from a checkpoint, those that were used before it are left out.
        """
        if rows < 1:
            raise DataError(f"batches of {rows} rows: ask for at least 1")
        here = position.get()
        first = here.deal(Deal(len(self.train), self._digest(), seed)) if here else 0
        return self._deal(rows, seed, first, here)

    def _deal(self, rows: int, seed: int, first: int, here: Position | None) -> Iterator[Batch]:
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


def check_task(config: TaskConfig) -> None:
    """Read the first row and fill both templates; DataError where that fails. Reads no more than that."""
    where, row = next(iter(_read(config, rows=1)))
    fill(config.prompt, row, f"{where}: prompt")
    fill(config.answer, row, f"{where}: answer")


def fill(template: str, row: Mapping[str, object], where: str) -> str:
    """The template with the row's values in it."""
    try:
        return _FORMATTER.vformat(template, (), row)
    except KeyError as error:
        key = str(error.args[0])
        near = nearest(key, row.keys())
        raise DataError(
            f"{where}: the template {template!r} needs {key!r}, which the row lacks"
            + (f"; did you mean {near!r}?" if near else f"; it has {', '.join(map(repr, row))}")
        ) from error
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


def _place(prompt: str) -> float:
    """A number in [0, 1) that depends on the prompt alone."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest()) / 2**64


def _batch(rows: Mapping[str, tuple[str, Row]], prompts: list[str]) -> Batch:
    answers = [rows[prompt][0] for prompt in prompts]
    return Batch.of(prompt=list(prompts), answer=answers, row=[rows[prompt][1] for prompt in prompts])


# --- sources: each yields (where the row stands, the row) ----------------------------------------


def _read(config: TaskConfig, rows: int | None = None) -> Iterable[tuple[str, Row]]:
    source, _, name = config.source.partition(":")
    if source == "reasoning_gym":
        return _reasoning_gym(name, config.options, rows)
    if source == verifiers.NAME:
        found = enumerate(verifiers.rows(name, config.options, rows))
        return _some(((f"{config.source}, row {number}", row) for number, row in found), config.source)
    path = Path(config.source)
    readers = {".jsonl": _json_lines, ".parquet": _parquet}
    if path.suffix not in readers:
        raise DataError(
            f"task source {config.source!r}: must be reasoning_gym:NAME, verifiers:ENV_ID, FILE.jsonl or FILE.parquet"
        )
    if config.options:
        raise DataError(f"task source {config.source!r}: a file takes no options; reasoning_gym and verifiers do")
    if not path.is_file():
        raise DataError(f"task source {config.source!r}: there is no file {path.resolve()}")
    return _some(readers[path.suffix](path), config.source)


def _some(rows: Iterator[tuple[str, Row]], source: str) -> Iterator[tuple[str, Row]]:
    first = next(rows, None)
    if first is None:
        raise DataError(f"task source {source!r}: it has no rows")
    return itertools.chain([first], rows)


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row: object = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise DataError(f"{where}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f'{where}: a row must be an object such as {{"question": ...}}, not {_kind(row)}')
            yield where, cast("Row", row)


def _kind(value: object) -> str:
    names: dict[type, str] = {
        list: "a list",
        str: "a text",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow as pa  # noqa: PLC0415 -- an extra, and slow to import
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise DataError(f"{path}: parquet files need pyarrow: pip install 'meshrl[tasks]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            numbers = itertools.count()
            for part in file.iter_batches():
                for row in part.to_pylist():
                    yield f"{path}, row {next(numbers)}", row
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a parquet file that can be read: {error}") from error


class _Dataset(Protocol):
    def __iter__(self) -> Iterator[Row]: ...


def _reasoning_gym(name: str, options: Mapping[str, JsonValue], rows: int | None) -> Iterator[tuple[str, Row]]:
    source = f"reasoning_gym:{name}"
    try:
        import reasoning_gym  # noqa: PLC0415 -- an extra, and slow to import
        from reasoning_gym.factory import DATASETS  # noqa: PLC0415
    except ImportError as error:
        raise DataError(f"{source}: needs reasoning_gym: pip install 'meshrl[tasks]'") from error
    if name not in DATASETS:
        near = nearest(name, DATASETS.keys())
        raise DataError(
            f"{source}: reasoning_gym has no dataset of this name among its {len(DATASETS)}"
            + (f"; did you mean {near!r}?" if near else "")
        )
    # Without a seed reasoning_gym draws other rows in each process.
    given: dict[str, object] = {"seed": 0, "size": 10_000, **options}
    try:
        dataset: _Dataset = reasoning_gym.create_dataset(name, **given)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{source}: its options {given} do not fit: {error}") from error
    items = itertools.islice(iter(dataset), rows)
    return _some(((f"{source}, row {number}", item) for number, item in enumerate(items)), source)
