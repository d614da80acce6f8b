"""A controller that is killed at any await goes on: each prompt is trained once or dropped, and the bound holds.

`grpo` and `ppo`, unchanged, on roles without a model in virtual time. Every moment of a run is noted at which a kill
could end it (`meshrl.testing.KillPoints`), and from each state of the disk that was there a run goes on to its end.
"""

import ast
import asyncio
import gc
import json
import shutil
import types
from collections import Counter
from collections.abc import Coroutine, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl import Batch, Loss, MeshConfig, Metrics, PolicyConfig, Run, RunConfig, Task
from meshrl.config import validate
from meshrl.run import audit_run
from meshrl.run.jobs import Script, load_script, shipped_scripts
from meshrl.testing import (
    FakeCritic,
    FakePolicy,
    FakeReference,
    FakeReward,
    FakeSampler,
    KillPoints,
    Lognormal,
    delayed,
    simulate,
)

STEPS, PROMPTS = 3, 2


class Diary(FakePolicy):
    """A policy whose state tells which groups it was trained on, an update after another."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, skill=0.4, rate=0.05)
        self.trained: list[list[int]] = []
        self.copied: list[list[int]] = []
        self.place: Path | None = None

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        self.trained.append(sorted(set(batch.groups.tolist())))
        return await super().update(batch, loss)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        await super().checkpoint(folder, wait)
        self.copied, self.place = self.trained.copy(), Path(folder)
        if wait:
            await self.written()

    async def written(self) -> None:
        if self.place and self.place.is_dir():
            (self.place / "diary.json").write_bytes(msgspec.json.encode(self.copied))

    async def restore(self, folder: str) -> None:
        await super().restore(folder)
        self.trained = msgspec.json.decode(Path(folder, "diary.json").read_bytes(), type=list[list[int]])

    async def save(self, folder: str) -> None:
        await super().save(folder)
        Path(folder, "diary.json").write_bytes(msgspec.json.encode(self.trained))


@pytest.fixture(autouse=True)
def _roles(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = Lognormal(0.1, 1), Lognormal(1, 0.5)
    policy = delayed(Diary, update=long, weights=short, logprobs=short, written=short)
    critic = delayed(FakeCritic, update=long, advantages=short)
    roles = {
        "Policy": delayed(policy, checkpoint=short, restore=short, save=short),
        "Critic": delayed(critic, checkpoint=short, restore=short, save=short),
        "Sampler": delayed(FakeSampler, generate=Lognormal(0.3, 1), load=short),
        "Reward": delayed(FakeReward, score=short),
        "Reference": delayed(FakeReference, logprobs=short),
    }
    monkeypatch.setattr("meshrl.run.run.implementation", lambda role, _: roles[role.__name__])
    monkeypatch.setattr(Task, "load", lambda _: task())


@pytest.fixture(autouse=True)
def _collected_fast() -> Iterator[None]:
    """Hundreds of simulations each collect their own garbage: not all that was there before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def task() -> Task:
    def rows(count: int) -> Batch:
        sums = {"prompt": [f"{n}+1=" for n in range(count)], "answer": [f"{n + 1}" for n in range(count)]}
        return Batch.of(**sums, row=[{}] * count)

    return Task(train=rows(5), held_out=rows(2))  # the second epoch begins in the last step


@cache
def script(name: str) -> Script:
    return load_script(shipped_scripts()[name])


@dataclass(frozen=True)
class Setting:
    """A run that is killed."""

    algorithm: str
    ahead: int
    meanwhile: bool
    """Whether it trains on while a checkpoint is written."""

    def __str__(self) -> str:
        return f"{self.algorithm}, ahead={self.ahead}{', written meanwhile' if self.meanwhile else ''}"

    async def run(self, folder: Path) -> None:
        """Begin, or go on."""
        fake = {"backend": "fake", "model": "none"}
        table = {
            "task": {"source": "none"},
            "policy": fake,
            "reward": {"backend": "fake"},
            "sampling": {"n": 2},
            "prompts": PROMPTS,
            "minibatches": 2,
            "loss": {"kl": 0.1, "anchor": "trainer"},
            "evaluation": {"every": 2, "wait": not self.meanwhile},
            "ahead": self.ahead,
            "steps": STEPS,
        }
        config = validate(script(self.algorithm).schema, table, "test")
        settings = RunConfig(
            folder=str(folder),
            meshes={"main": MeshConfig(cpus=0)},
            log=[],
            samples_every=1,
            checkpoint_every=1,
            checkpoint_async=self.meanwhile,
            resume=True,
        )
        resolved = {**config.model_dump(mode="json"), "run": settings.model_dump(mode="json")}
        async with Run(settings, resolved) as run:
            await script(self.algorithm).function(run, config)


SETTINGS = [Setting(*each) for each in product(("grpo", "ppo"), (0, 1, 3), (False, True))]


def check_kept(folder: Path, setting: Setting) -> None:
    """A run that has ended did what it promises: by its files, and by what its policy says that it was trained on."""
    found = audit_run(folder / "run")
    assert found.status == "finished"
    assert found.holds, [verdict.breaches for verdict in found.verdicts]
    assert found.steps == STEPS
    assert found.staleness is not None
    assert found.staleness <= setting.ahead
    assert not found.missing
    diary = msgspec.json.decode((folder / "run/model/diary.json").read_bytes(), type=list[list[int]])
    updates = Counter(chain.from_iterable(diary))
    assert found.trained == len(updates) == STEPS * PROMPTS
    assert len(diary) == 2 * STEPS, "a step has two updates"
    step_of = {group: number // 2 for number, groups in reversed([*enumerate(diary)]) for group in groups}
    assert all(step_of[group] == number // 2 for number, groups in enumerate(diary) for group in groups)


def outcome(folder: Path, setting: Setting) -> dict[str, object]:
    """All that a run leaves but for times, and how it came there."""
    run = folder / "run"

    def lines(name: str) -> list[dict[str, object]]:
        rows = [json.loads(line) for line in (run / name).read_text("utf-8").splitlines()]
        return [{key: row[key] for key in row if key not in ("seconds", "step_s")} for row in rows]

    summary = json.loads((run / "summary.json").read_bytes())
    states = {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.glob("checkpoints/*/*/*"))}
    return {
        **{name: lines(name) for name in ("metrics.jsonl", "samples.jsonl")},
        # What an evaluation finds for which nothing waits hangs on when it draws.
        "evaluations": [row["step"] if setting.meanwhile else row for row in lines("evaluations.jsonl")],
        "summary": {key: summary[key] for key in summary if key != "wall_s"},
        "model": {path.name: path.read_bytes() for path in sorted((run / "model").iterdir())},
        "states": states,
        "files": sorted(path.name for path in run.iterdir() if not path.name.startswith("events-")),
    }


def awaits(path: Path) -> Iterator[range]:
    """The lines of each await of a script: also of what `async for` and `async with` await."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Await):
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1)
        elif isinstance(node, ast.AsyncFor | ast.AsyncWith):
            yield range(node.lineno, node.body[0].lineno)


def go_on(folder: Path, setting: Setting, whole: dict[str, object], after: str) -> None:
    """Begin again what has ended somehow; it ends well."""
    with capture_logs():
        simulate(lambda: setting.run(folder))
    check_kept(folder, setting)
    if not setting.ahead:
        assert outcome(folder, setting) == whole, after


@types.coroutine
def interrupted(main: Coroutine[object, object, None], at: int, stood: list[str]) -> Generator[object, object, None]:
    """The program, cancelled at one of its awaits as by Ctrl-C; `stood` gets where it waits, an await after another."""
    raised: BaseException | None = None
    while True:
        try:
            awaited = main.send(None) if raised is None else main.throw(raised)
        except StopIteration:
            return
        task = asyncio.current_task()
        assert task is not None
        stood.append(task.get_name())
        if len(stood) == at:
            task.cancel()
        raised = None
        try:
            yield awaited
        except BaseException as error:  # noqa: BLE001 -- which is the program's
            raised = error


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_run_that_is_killed_at_any_await_goes_on(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(setting.algorithm).path
    runs = tmp_path / "runs"
    runs.mkdir()
    points = KillPoints(runs, tmp_path / "copies", [path])
    with capture_logs():
        points.watch(lambda: setting.run(runs))
    check_kept(runs, setting)
    whole = outcome(runs, setting)

    killed = {line for file, line in points.lines if file == str(path)}
    assert not [lines for lines in awaits(path) if killed.isdisjoint(lines)], "an await at which nobody was killed"
    for left in points.remains:
        go_on(left.folder, setting, whole, f"killed after {left.after}")
    with capsys.disabled():
        print(  # noqa: T201 -- how much was tried
            f"\n{setting}: killed at {points.moments:,} moments, at {len(points.awaits)} awaits and "
            f"{len(killed)} lines of the script; gone on from {len(points.remains)} states of the disk"
        )


@pytest.mark.parametrize("setting", [each for each in SETTINGS if each.ahead != 1 and not each.meanwhile], ids=str)
def test_a_run_that_goes_on_and_is_killed_again_at_any_await_goes_on(setting: Setting, tmp_path: Path) -> None:
    path, runs, again = script(setting.algorithm).path, tmp_path / "runs", tmp_path / "again"
    runs.mkdir()
    first = KillPoints(runs, tmp_path / "first", [path])
    with capture_logs():
        first.watch(lambda: setting.run(runs))
    whole = outcome(runs, setting)
    half = [left.folder for left in first.remains if left.after == "half of write(run.json)"]
    shutil.copytree(half[1], again)  # one checkpoint is whole, the next is half-written
    points = KillPoints(again, tmp_path / "copies", [path])
    with capture_logs():
        points.watch(lambda: setting.run(again))
    for left in points.remains:
        go_on(left.folder, setting, whole, f"killed again after {left.after}")


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_run_that_is_interrupted_at_any_await_goes_on(
    setting: Setting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main(folder: Path, at: int, stood: list[str]) -> None:
        await interrupted(setting.run(folder), at, stood)

    awaits: list[str] = []
    with capture_logs():
        simulate(lambda: main(tmp_path / "whole", 0, awaits))
    whole = outcome(tmp_path / "whole", setting)
    for at in range(1, len(awaits) + 1):
        folder = tmp_path / str(at)
        with capture_logs(), suppress(asyncio.CancelledError):
            simulate(lambda: main(folder, at, []))  # noqa: B023 -- called at once
        go_on(folder, setting, whole, f"interrupted at await {at} of {len(awaits)}")
    with capsys.disabled():
        print(f"\n{setting}: interrupted at {len(awaits)} awaits")  # noqa: T201 -- as above
