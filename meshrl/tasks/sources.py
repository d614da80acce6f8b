"""Sources of a task's rows: files, the hub, the built-in task, and other packages."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol, cast, get_type_hints

import msgspec
from pydantic import JsonValue

from meshrl.config import DEEPEST, too_deep, validate
from meshrl.errors import ConfigError, DataError, did_you_mean, shortened
from meshrl.hub import dataset_rows
from meshrl.tasks import verifiers
from meshrl.tasks.config import TaskConfig
from meshrl.tasks.spelling import NAME, SpellingConfig, spelling_rows

Row = dict[str, object]

_MARK: Final = b"\xef\xbb\xbf"
"""The byte order mark that some editors write at the start of UTF-8 files."""
_TOLD: Final = 3
"""Number of lines with mistakes that an error names."""
_LOOKED_AT: Final = 20_000
"""Number of lines after the first mistake that are checked for more."""
_MOST: Final = 10_000_000
"""Most rows of a generated task. All of them are in memory."""


def read_rows(config: TaskConfig, rows: int | None = None) -> Iterable[tuple[str, Row]]:
    """Yield each row of a task's source with its place. Stops after `rows` rows if the source can read fewer.

    Raises DataError for an unknown source, a file that is missing or has options, and a row that cannot be read.
    """
    if config.source == NAME:
        options = validate(SpellingConfig, config.options, f"{NAME}: task.options")
        return _some(((f"{NAME}, row {number}", row) for number, row in enumerate(spelling_rows(options))), NAME)
    source, _, name = config.source.partition(":")
    if source == "hf":
        items = enumerate(dataset_rows(name, config.options, rows))
        return _some(((f"{config.source}, row {number}", row) for number, row in items), config.source)
    if source == "reasoning_gym":
        return _reasoning_gym(name, config.options, rows)
    if source == verifiers.NAME:
        found = enumerate(verifiers.rows(name, config.options, rows))
        return _some(((f"{config.source}, row {number}", row) for number, row in found), config.source)
    path = Path(config.source)
    readers = {".jsonl": _json_lines, ".parquet": _parquet}
    if path.is_dir():
        files = sorted(each.name for each in path.iterdir() if each.suffix in readers)
        hint = f"name a file in it, such as {path / files[0]}" if files else "it has no .jsonl or .parquet file"
        raise DataError(f"task source {config.source!r}: is a folder, but rows are read from one file: {hint}")
    if path.suffix not in readers:
        raise DataError(
            f"task source {config.source!r}: must be FILE.jsonl, FILE.parquet, hf:ORG/NAME, {NAME}, "
            "reasoning_gym:NAME or verifiers:ENV_ID"
        )
    if config.options:
        raise DataError(f"task source {config.source!r}: a file takes no options: write task.options = {{}}")
    if not path.is_file():
        raise DataError(f"task source {config.source!r}: there is no file {path.resolve()}")
    return _some(readers[path.suffix](path), config.source)


def numbered_rows(rows: Iterable[object]) -> Iterator[tuple[str, Row]]:
    """Yield rows in memory with their places. DataError if there are none, or one is not a mapping."""

    def numbered() -> Iterator[tuple[str, Row]]:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(f"rows, row {number}: must be a mapping such as {{'question': ...}}, not {_kind(row)}")
            yield f"rows, row {number}", dict(cast("Mapping[str, object]", row))

    return _some(numbered(), "rows")


def _some(rows: Iterator[tuple[str, Row]], source: str) -> Iterator[tuple[str, Row]]:
    first = next(rows, None)
    if first is None:
        raise DataError(f"task source {source!r}: it has no rows")
    return itertools.chain([first], rows)


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
    told, more = [str(first)], 0
    for number, line in itertools.islice(rest, _LOOKED_AT):
        try:
            if line.strip():
                _json_row(line, f"line {number}")
        except DataError as error:
            if len(told) < _TOLD:
                told.append(str(error))
            else:
                more += 1
    return DataError("; ".join([*told, *([f"and {more:,} lines more"] if more else [])]))


def _json_row(line: bytes, where: str) -> Row:
    row: object = None
    try:
        row = msgspec.json.decode(line)
        deep = line.count(b"[") + line.count(b"{") > DEEPEST and too_deep(row)
    except msgspec.DecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from error
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
    number = 0
    try:
        # Otherwise a damaged page with a checksum would be read as other text.
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            _check_columns(path, file.schema_arrow)
            for part in file.iter_batches():
                for row in part.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError also for text that is not UTF-8
        raise DataError(
            f"{path}: cannot be read as a parquet file from row {number} on: {error}. Make or download it again"
        ) from error


class _Kind(Protocol):
    """A type of pyarrow, which has no annotations."""

    num_fields: int

    def field(self, index: int) -> "_Field": ...


class _Field(Protocol):
    type: _Kind


class _Schema(Protocol):
    names: list[str]

    def field(self, name: str) -> _Field: ...


def _check_columns(path: Path, schema: _Schema) -> None:
    """Raise DataError if a column has a type that rows cannot hold, or if two have the same name."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise DataError(f"{path}: {schema.names.count(name)} columns have the name {name!r}: rename all but one")
        field = schema.field(name)
        if alien := _alien(field.type):
            raise DataError(
                f"{path}: column {name!r} is of {field.type}, and a row cannot hold {alien}: rows are of texts, "
                "numbers, true, false, null, lists and tables. Write the column as text, or leave it out"
            )


def _alien(kind: _Kind) -> str:
    """Return the part of a column's type that rows cannot hold. Empty if there is none."""
    from pyarrow import types  # noqa: PLC0415 -- an extra, and slow to import

    if types.is_temporal(kind):
        return "a date or time"
    if types.is_decimal(kind):
        return "a decimal"
    if types.is_map(kind):
        return "a map"
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    if value := getattr(kind, "value_type", None):  # of a dictionary column
        inner.append(value)
    return next(filter(None, map(_alien, inner)), "")


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
        hint = did_you_mean(name, DATASETS)
        raise DataError(
            f"{source}: reasoning_gym has no dataset of this name among its {len(DATASETS)}" + (hint and f"; {hint}")
        )
    # Without a seed, reasoning_gym draws other rows in each process.
    given: dict[str, object] = {"seed": 0, "size": 10_000, **options}
    _check_options(source, options, DATASETS[name][1])
    try:
        dataset: _Dataset = reasoning_gym.create_dataset(name, **given)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{source}: its options {given} do not fit: {error}") from error
    items = itertools.islice(iter(dataset), rows)
    return _some(((f"{source}, row {number}", item) for number, item in enumerate(items)), source)


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
    if default is dataclasses.MISSING:
        return True
    try:
        msgspec.convert(msgspec.to_builtins(default), kind)
    except (msgspec.ValidationError, TypeError):
        return False
    return True
