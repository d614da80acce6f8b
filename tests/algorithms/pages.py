"""What tests of the pages share: how a page is run as it ships, on files or in virtual time, and small tasks."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from meshrl import Batch, Run, RunConfig, Task
from meshrl.cli import main
from meshrl.config import validate
from meshrl.run.jobs import Script, load_script
from meshrl.testing import FakeRun

ALGORITHMS = Path(__file__).parents[2] / "algorithms"
NAMES = sorted(page.stem for page in ALGORITHMS.glob("*.py"))
FAKE = {"backend": "fake", "model": "none"}
FAKES: Mapping[str, object] = {
    "task": {"source": "none"}, "policy": FAKE, "sampler": FAKE, "reward": {"backend": "fake"},
}  # fmt: skip
TIMES = ("seconds", "step_s", "sampler_pause_s")


class Ran(NamedTuple):
    folder: Path
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, float]]


@cache
def script(name: str) -> Script:
    return load_script(ALGORITHMS / f"{name}.py")


def lines(file: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return [{key: line[key] for key in line if key not in TIMES} for line in found]


async def run_page(name: str, folder: Path, table: Mapping[str, object], **keys: object) -> Ran:
    config = validate(script(name).schema, table, "test")
    run_config = RunConfig.model_validate(
        {"folder": str(folder), "name": name, "meshes": {"main": {"cpus": 1}}, **keys}
    )
    async with Run(run_config) as run:
        await script(name).function(run, config)
    summary = json.loads((run.folder / "summary.json").read_bytes())
    return Ran(run.folder, summary, lines(run.folder / "metrics.jsonl"))


async def play(name: str, run: FakeRun | Run, table: Mapping[str, object], task: Task) -> None:
    with patch.object(Task, "load", lambda _: task):
        await script(name).function(run, validate(script(name).schema, table, "test"))


def meshrl(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def numbers(first: int, count: int) -> Batch:
    sums = range(first, first + count)
    return Batch.of(prompt=[f"{n}+1=" for n in sums], answer=[str(n + 1) for n in sums], row=[{}] * count)


def write_task(folder: Path, rows: Iterable[Mapping[str, object]], **chosen: object) -> dict[str, object]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return {"source": str(path), **chosen}
