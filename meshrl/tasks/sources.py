"""Where a task's rows come from: its table, and the readers of files, the hub, the built-in task and other packages."""

import dataclasses
import itertools
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final, Literal, cast, get_type_hints

import msgspec
import numpy as np
from pydantic import Field, JsonValue

from meshrl.config import DEEPEST, Config, PathIn, too_deep, validate
from meshrl.errors import ConfigError, DataError, did_you_mean, shortened
from meshrl.hub import dataset_rows
from meshrl.roles import ModelConfig
from meshrl.tasks import harness, verifiers
from meshrl.tasks.cells import plain

Row = dict[str, object]
_Length = Annotated[int, Field(ge=3, le=8)]

SPELLING: Final = "meshrl:spell_backward"
SHAPES: Final = "meshrl:shapes"
GENERATORS: Final = ("meshrl:", "reasoning_gym:")
"""The starts of sources that draw rows, perhaps the same one again."""
_MARK: Final = b"\xef\xbb\xbf"
"""The byte order mark that some editors write at the start of UTF-8 files."""
_NAMED: Final = 3
"""Number of lines with mistakes that an error names."""
_CHECKED: Final = 20_000
"""Number of lines after the first mistake that are checked for more."""
_MOST: Final = 10_000_000
"""Most rows of a generated task. All of them are in memory."""


class MessageTemplate(Config):
    """A template for one message of a dialogue."""

    role: Literal["system", "user", "assistant", "tool"]
    """Role of the message's author."""
    content: str
    """Template of the message's text, in the format of `TaskConfig.prompt`."""


class TaskConfig(Config):
    """Where the rows of data come from, and the templates that turn a row into a prompt and an answer."""

    source: Annotated[str, PathIn(r"(?!\w+:)(.+\.(?:jsonl|parquet))")]
    """Where the rows come from: a .jsonl or .parquet file, a dataset of the hub (`hf:ORG/NAME` or
    `hf:ORG/NAME@REVISION`), `meshrl:spell_backward`, `meshrl:shapes`, `reasoning_gym:NAME`, `lm_eval:TASK`, or
    `verifiers:TASKSET`."""
    options: Mapping[str, JsonValue] = Field(default={})
    """Options of the source. For spell_backward: `min_word_len` (3), `max_word_len` (8), `size` (10,000) and `seed`
    (0). For shapes: `size` (2,000), `pixels` (32), `varied` (1.0), how far figures differ in size and place, and
    `seed` (0). For reasoning_gym: `size`, `seed` and the dataset's own options. For lm_eval: `split` ("test", or
    "train"), `num_fewshot` (the task's) and `data` (a file of rows, or a file for each split). For verifiers: `python`,
    the Python that it is installed in (".venv-verifiers/bin/python"), `size`, the most tasks to read, and `env`, the
    library's own table. For the hub: arguments of `datasets.load_dataset`, such as `name`, the dataset's configuration,
    and `split` ("train")."""
    prompt: str = "{question}"
    """Template of the prompt, with the row's keys, as for `str.format`. `{metadata[word]}` reads a key of a nested
    table, and `{{` is a brace."""
    answer: str = "{answer}"
    """Template of the answer, in the same format. If the row's answer is null, the answer is the empty text. If the
    template is one key of a list, each text and number of the list is an accepted answer."""
    dialogues: tuple[tuple[MessageTemplate, ...], ...] = ()
    """Templates of dialogues, which rows use in turn, instead of prompt and answer. `sft` learns the assistant's
    messages in the policy's chat template. Default: no dialogues."""
    images: tuple[str, ...] = ()
    """The row's keys with images: a path, bytes, a URL, or a list of these. A path starts at the folder of the task's
    file. In a template, such a key puts its images there. Images that no template names come first."""
    image_hosts: tuple[str, ...] = ()
    """Hosts from which images with a URL are fetched. "*" allows every host with a public address. Default: none."""
    max_prompt_tokens: int | None = Field(default=None, gt=0)
    """Leave out prompts with more tokens than this. Tokens are counted in the chat template of the policy, or of the
    first role with a model if there is no policy. By default no prompt is left out."""
    reader: ModelConfig | None = None
    """The model that counts tokens for `max_prompt_tokens`. The algorithm's configuration fills it in."""
    held_out: Annotated[int, Field(ge=0)] | Literal["all"] = 512
    """Number of different prompts to hold out from training, with all their rows. "all" holds out every prompt of
    `held_out_fraction`, and 0 trains on every prompt."""
    held_out_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of the prompts that `held_out` is drawn from. A hash of the prompt decides, so it is the same in every
    run."""


class ShapesConfig(Config):
    """The keys of `task.options` for the drawn figures."""

    size: Annotated[int, Field(ge=1, le=1_000_000)] = 2_000
    pixels: Annotated[int, Field(ge=16, le=1024)] = 32
    varied: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 0


_COLOURS: Final = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (230, 190, 30)}
_SHAPES: Final = ("circle", "square", "triangle")


def shape_rows(config: ShapesConfig) -> Iterator[dict[str, object]]:
    """Yield rows with an `image`, the file of a drawn figure, its `colour`, its `shape`, and both as the `answer`."""
    try:
        from PIL import Image, ImageDraw  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise DataError(f"{SHAPES}: figures are drawn by Pillow: pip install 'meshrl[images]'") from error
    for number in range(config.size):
        random = Random(config.seed + number)
        colour, shape = random.choice([*_COLOURS]), random.choice(_SHAPES)
        width = (0.6 - config.varied * random.uniform(0, 0.25)) * config.pixels
        left, top = ((config.pixels - width) * (0.5 + config.varied * (random.uniform(0, 1) - 0.5)) for _ in range(2))
        box = (left, top, left + width, top + width)
        image = Image.new("RGB", (config.pixels, config.pixels), (255, 255, 255))
        draw, fill = ImageDraw.Draw(image), _COLOURS[colour]
        if shape == "circle":
            draw.ellipse(box, fill)
        elif shape == "square":
            draw.rectangle(box, fill)
        else:
            draw.polygon([(left + width / 2, top), (left + width, top + width), (left, top + width)], fill)
        file = BytesIO()
        image.save(file, "PNG")
        yield {"image": file.getvalue(), "colour": colour, "shape": shape, "answer": f"{colour} {shape}"}


class SpellingConfig(Config):
    """The keys of `task.options`. Equal options give the same rows as `spell_backward` of reasoning_gym."""

    min_word_len: _Length = 3
    max_word_len: _Length = 8
    size: Annotated[int, Field(ge=1, le=_MOST)] = 10_000
    seed: int = 0


def spelling_rows(config: SpellingConfig) -> Iterator[dict[str, object]]:
    """Yield rows with a `question`, an `answer` and the `word`, with replacement. None if no length is allowed."""
    words = _words(config.min_word_len, config.max_word_len)
    for number in range(config.size if words else 0):
        word = Random(config.seed + number).choice(words)
        question = f"Spell this word backward (example: sun -> nus): {word}"
        yield {"question": question, "answer": word[::-1], "word": word}


@cache
def _words(shortest: int, longest: int) -> Sequence[str]:
    """Read English words of some lengths, 3 to 8 at most, in reasoning_gym's `words3to10.txt` (Apache License 2.0)."""
    words = lzma.decompress(files("meshrl.tasks").joinpath("words.txt.xz").read_bytes()).decode().split()
    return [word for word in words if shortest <= len(word) <= longest]


def read_rows(config: TaskConfig, rows: int | None = None) -> Iterable[tuple[str, Row]]:
    """Yield each row of a task's source with its place. Stops after `rows` rows if the source can read fewer.

    Raises DataError for an unknown source, a file that is missing or has options, and a row that cannot be read.
    """
    source, _, name = config.source.partition(":")
    items: Iterable[Row]
    if config.source == SHAPES:
        items = shape_rows(validate(ShapesConfig, config.options, f"{SHAPES}: task.options"))
    elif config.source == SPELLING:
        items = spelling_rows(validate(SpellingConfig, config.options, f"{SPELLING}: task.options"))
    elif source == "hf":
        found = dataset_rows(name, config.options, rows, config.images)
        return _plain_rows(_numbered(found, config.source), config.images)
    elif source == "reasoning_gym":
        items = _reasoning_gym(name, config.options, rows)
    elif source == harness.NAME:
        items = harness.rows(name, config.options, rows)
    elif source == verifiers.NAME:
        items = verifiers.rows(name, config.options, rows)
    else:
        rows_of_file = _file_rows(config)
        is_plain = config.source.endswith(".jsonl")
        return _some(rows_of_file if is_plain else _plain_rows(rows_of_file, config.images), config.source)
    return _numbered(items, config.source)  # unchanged, because the package's own reward reads them


def numbered_rows(rows: Iterable[object], images: Sequence[str] = ()) -> Iterator[tuple[str, Row]]:
    """Yield rows in memory with their places. DataError if there are none, or one is not a mapping.

    `images`: keys whose values stay as they are.
    """

    def copies() -> Iterator[Row]:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(f"rows, row {number}: must be a mapping such as {{'question': ...}}, not {_kind(row)}")
            yield cast("Row", row)

    return _plain_rows(_numbered(copies(), "rows"), images)


def _numbered(rows: Iterable[Row], source: str) -> Iterator[tuple[str, Row]]:
    return _some(((f"{source}, row {number}", row) for number, row in enumerate(rows)), source)


def _plain_rows(rows: Iterable[tuple[str, Row]], images: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield rows with the values that they would have as lines of JSON, except those of `images`."""
    for where, row in rows:
        yield (
            where,
            {name: value if name in images else plain(value, f"{where}: `{name}`") for name, value in row.items()},
        )


def _some(rows: Iterator[tuple[str, Row]], source: str) -> Iterator[tuple[str, Row]]:
    """Return the rows. DataError if there are none."""
    first = next(rows, None)
    if first is None:
        raise DataError(f"task source {source!r}: it has no rows")
    return itertools.chain([first], rows)


def _file_rows(config: TaskConfig) -> Iterator[tuple[str, Row]]:
    path = Path(config.source)
    readers = {".jsonl": _json_lines, ".parquet": _parquet}
    if path.is_dir():
        files = sorted(each.name for each in path.iterdir() if each.suffix in readers)
        hint = f"name a file in it, such as {path / files[0]}" if files else "it has no .jsonl or .parquet file"
        raise DataError(f"task source {config.source!r}: is a folder, but rows are read from one file: {hint}")
    if path.suffix not in readers:
        raise DataError(
            f"task source {config.source!r}: must be FILE.jsonl, FILE.parquet, hf:ORG/NAME, {SPELLING}, "
            "reasoning_gym:NAME, lm_eval:TASK or verifiers:TASKSET"
        )
    if config.options:
        raise DataError(f"task source {config.source!r}: a file takes no options: write task.options = {{}}")
    if not path.is_file():
        raise DataError(f"task source {config.source!r}: there is no file {path.resolve()}")
    return readers[path.suffix](path)


def _json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(_MARK) if number == 1 else line
            if text.strip():
                where = f"{path}, line {number}"
                try:
                    row = _json_row(text, where)
                except DataError as error:
                    raise _with_others(error, enumerate(lines, start=number + 1)) from error
                yield where, row


def _with_others(first: DataError, rest: Iterable[tuple[int, bytes]]) -> DataError:
    """Return the error of a line, with those of later lines. If there are many, they are only counted."""
    messages = [str(first)]
    for number, line in itertools.islice(rest, _CHECKED):
        try:
            if line.strip():
                _json_row(line, f"line {number}")
        except DataError as error:
            messages.append(str(error))
    more = len(messages) - _NAMED
    return DataError("; ".join([*messages[:_NAMED], *([f"and {more:,} lines more"] if more > 0 else [])]))


def _json_row(line: bytes, where: str) -> Row:
    row: object = None
    try:
        row = msgspec.json.decode(line)
        deep = line.count(b"[") + line.count(b"{") > DEEPEST and too_deep(row)
    except msgspec.DecodeError as error:
        hint = "; write null for NaN" if any(each in line for each in (b"NaN", b"Infinity")) else ""
        raise DataError(f"{where}: not JSON: {error}{hint}") from error
    except UnicodeDecodeError:
        raise DataError(f"{where}: {_not_utf8(line)}") from None
    except RecursionError:
        deep = True
    if deep:
        raise DataError(f"{where}: lists and tables are nested more than {DEEPEST} deep: flatten the row")
    if not isinstance(row, dict):
        raise DataError(f'{where}: a row must be an object such as {{"question": ...}}, not {_kind(row)}')
    return cast("Row", row)


def _not_utf8(line: bytes) -> str:
    """Say what is wrong with bytes that are not UTF-8."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} is {line[error.start]:#04x}, which is not UTF-8: save the file as UTF-8"
    return "not UTF-8: save the file as UTF-8"


def _kind(value: object) -> str:
    names: dict[type, str] = {list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow as pa  # noqa: PLC0415 -- an extra, and slow to import
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise DataError(f"{path}: parquet files need pyarrow: pip install 'meshrl[tasks]'") from error
    number = 0
    try:
        # Otherwise a damaged page with a checksum would be read as other text.
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            if twice := {name for name in names if names.count(name) > 1}:
                raise DataError(f"{path}: several columns have the name {min(twice)!r}: rename all but one")
            for part in file.iter_batches():
                wide = {field.name: field.type for field in part.schema if "float" in str(field.type)}
                for row in _rows_of(part, path, number):
                    yield f"{path}, row {number}", row | {name: _decimals(row[name], wide[name]) for name in wide}
                    number += 1
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # ValueError also for text that is not UTF-8
        raise DataError(
            f"{path}: cannot be read as a parquet file from row {number} on: {error}. Make or download it again"
        ) from error


def _rows_of(part: Any, path: Path, first: int) -> list[Row]:
    """Return the rows of a part of a parquet file, from row `first` on. DataError for a map that has a key twice."""
    try:
        return cast("list[Row]", part.to_pylist(maps_as_pydicts="strict"))
    except KeyError:
        for name, number in itertools.product(part.schema.names, range(len(part))):
            try:
                part.column(name)[number].as_py(maps_as_pydicts="strict")
            except KeyError as error:
                key = re.search("'.*'", str(error.args[0]), re.DOTALL)
                raise DataError(
                    f"{path}, row {first + number}: `{name}`: a map has {f'the key {key[0]}' if key else 'a key'} "
                    "twice: write it as a list of pairs, or leave the column out"
                ) from error
        raise


def _decimals(value: Any, kind: Any) -> Any:
    """Return a cell of a column whose short floats have the decimals that they have as text."""
    from pyarrow import types  # noqa: PLC0415 -- an extra, and slow to import

    if value is None:
        return None
    if short := {16: np.float16, 32: np.float32}.get(kind.bit_width if types.is_floating(kind) else 0):
        return short(value)
    if types.is_struct(kind):
        return {field.name: _decimals(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return {key: _decimals(each, kind.item_type) for key, each in value.items()}
    return [_decimals(each, kind.value_type) for each in value] if isinstance(value, list) else value


def _reasoning_gym(name: str, options: Mapping[str, JsonValue], rows: int | None) -> Iterator[Row]:
    source = f"reasoning_gym:{name}"
    try:
        import reasoning_gym  # noqa: PLC0415 -- an extra, and slow to import
        from reasoning_gym.factory import DATASETS  # noqa: PLC0415
    except ImportError as error:
        raise DataError(f"{source}: needs reasoning_gym: pip install 'meshrl[tasks]'") from error
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS)
        raise DataError(
            f"{source}: reasoning_gym has no dataset of this name among its {len(DATASETS)}" + (hint and f"; {hint}")
        )
    # Without a seed, reasoning_gym draws other rows in each process.
    given: dict[str, object] = {"seed": 0, "size": 10_000, **options}
    _check_options(source, options, DATASETS[name][1])
    try:
        dataset = cast("Iterable[Row]", reasoning_gym.create_dataset(name, **given))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{source}: its options {given} do not fit: {error}") from error
    return itertools.islice(dataset, rows)


def _check_options(source: str, options: Mapping[str, JsonValue], schema: type) -> None:
    """Raise ConfigError for an option of the wrong type, or one that asks for more than `_MOST` rows.

    An option whose default does not fit its declared type is not checked.
    """
    hints: Mapping[str, object] = get_type_hints(schema)
    defaults = {field.name: field.default for field in dataclasses.fields(schema)}
    for key, value in options.items():
        if key not in hints or not _fits(defaults[key], hints[key]):
            continue
        where = f"{source}: task.options.{key} = {shortened(value)}"
        try:
            msgspec.convert(value, hints[key])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}") from None
        if key == "size" and isinstance(value, int | float) and value > _MOST:
            raise ConfigError(f"{where}: a task has at most {_MOST:,} rows, which are held in memory: ask for fewer")


def _fits(default: object, kind: object) -> bool:
    with suppress(msgspec.ValidationError, TypeError):
        if default is not dataclasses.MISSING:
            msgspec.convert(msgspec.to_builtins(default), kind)
        return True
    return False
