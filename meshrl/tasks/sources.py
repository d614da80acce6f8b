"""Where a task's rows are read from: JSON lines, parquet, reasoning_gym, verifiers."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, cast

import msgspec
from pydantic import JsonValue

from meshrl.errors import DataError, did_you_mean
from meshrl.tasks import verifiers
from meshrl.tasks.config import TaskConfig

Row = dict[str, object]


def read_rows(config: TaskConfig, rows: int | None = None) -> Iterable[tuple[str, Row]]:
    """Each row of a task's source, with where it stands; the first `rows` alone, where the source can read fewer."""
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
        hint = did_you_mean(name, DATASETS)
        raise DataError(
            f"{source}: reasoning_gym has no dataset of this name among its {len(DATASETS)}" + (hint and f"; {hint}")
        )
    # Without a seed reasoning_gym draws other rows in each process.
    given: dict[str, object] = {"seed": 0, "size": 10_000, **options}
    try:
        dataset: _Dataset = reasoning_gym.create_dataset(name, **given)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{source}: its options {given} do not fit: {error}") from error
    items = itertools.islice(iter(dataset), rows)
    return _some(((f"{source}, row {number}", item) for number, item in enumerate(items)), source)
