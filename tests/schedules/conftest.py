"""Runs of `grpo` and `ppo` on roles without a model, and what has to hold when they have ended."""

import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from itertools import chain, product
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from meshrl import Batch, Metrics, PolicyConfig, RunConfig, Task, testing
from meshrl.algo import Loss
from meshrl.config import validate
from meshrl.run import Job, audit_run, run_job
from tests.algorithms.pages import FAKE, FAKES, lines, numbers, script

STEPS, PROMPTS = 3, 2


class Diary(testing.FakePolicy):
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


@dataclass
class Faults(testing.Latency):
    at: int = 0
    error: Callable[[], Exception] = Exception
    lasts: bool = False
    calls: int = 0

    def draw(self, random: Random, batch: Batch | None) -> float:
        self.calls += 1
        if self.calls == self.at or (self.lasts and self.calls > self.at):
            raise self.error()
        return testing.Lognormal(0.3, 1).draw(random, batch)


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    takes = Faults()
    policy = testing.delayed(Diary, update=takes, weights=takes, logprobs=takes, written=takes)
    critic = testing.delayed(testing.FakeCritic, update=takes, advantages=takes)
    roles = {
        "FakePolicy": testing.delayed(policy, checkpoint=takes, restore=takes, save=takes),
        "FakeCritic": testing.delayed(critic, checkpoint=takes, restore=takes, save=takes),
        "FakeSampler": testing.delayed(testing.FakeSampler, generate=takes, load=takes),
        "FakeReward": testing.delayed(testing.FakeReward, score=takes),
        "FakeReference": testing.delayed(testing.FakeReference, logprobs=takes),
    }
    for name, role in roles.items():
        monkeypatch.setattr(f"meshrl.testing.{name}", role)
    task = Task(train=numbers(0, 5), held_out=numbers(0, 2))  # the second epoch begins in the last step
    monkeypatch.setattr(Task, "load", lambda _: task)
    return takes


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What each of many runs would pay for again.

    No run waits for a real disk, or looks for backends in other packages than meshrl, and hundreds of simulations each
    collect their own garbage, not all that was there before.
    """
    own = [metadata.distribution("meshrl")]
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: own)
    monkeypatch.setattr("os.fsync", lambda _: None)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@dataclass(frozen=True)
class Setting:
    algorithm: str
    ahead: int
    meanwhile: bool

    def __str__(self) -> str:
        return f"{self.algorithm}, ahead={self.ahead}{', written meanwhile' if self.meanwhile else ''}"

    async def run(self, folder: Path, restarts: int = 0) -> None:
        await run_job(self.job(folder, restarts))

    def simulate(self, folder: Path, restarts: int = 0) -> Sequence[Mapping[str, Any]]:
        with capture_logs() as logged:
            testing.simulate(lambda: self.run(folder, restarts))
        return logged

    def job(self, folder: Path, restarts: int = 0) -> Job:
        table = {
            **FAKES,
            **dict.fromkeys(("reference", "critic") if self.algorithm == "ppo" else ("reference",), FAKE),
            "sampling": {"n": 2},
            "prompts": PROMPTS,
            "minibatches": 2,
            "loss": {"kl": 0.1, "anchor": "trainer"},
            "evaluation": {"every": 2, "pause_training": not self.meanwhile},
            "ahead": self.ahead,
            "steps": STEPS,
        }
        config = validate(script(self.algorithm).schema, table, "test")
        every_step = {"samples_every": 1, "checkpoint_every": 1, "checkpoint_async": self.meanwhile}
        given = {"folder": str(folder), "meshes": {"main": {"cpus": 0}}, "log": [], **every_step}
        settings = RunConfig.model_validate({**given, "resume": not restarts, "restarts": restarts})
        resolved: dict[str, object] = {**config.model_dump(mode="json"), "run": settings.model_dump(mode="json")}
        return Job(Path("test"), script(self.algorithm), settings, config, resolved)


SETTINGS = [Setting(*each) for each in product(("grpo", "ppo"), (0, 1, 3), (False, True))]
FEW = [Setting("grpo", 0, True), Setting("ppo", 0, False), Setting("grpo", 3, False), Setting("ppo", 1, True)]
"""Each two values beside each other."""


def some_or_all(some: list[Setting], places: int, **all_of: list[Setting]) -> pytest.MarkDecorator:
    """`settings`, and at how many places (`most`) each is disturbed: all where there is no number, in `wide`."""
    wide = [pytest.param(each, None, marks=pytest.mark.wide, id=name) for name, each in all_of.items()]
    return pytest.mark.parametrize(("settings", "most"), [pytest.param(some, places, id="some"), *wide])


SOME_OR_ALL = some_or_all(
    FEW, 6, **{f"all-{ahead}": [each for each in SETTINGS if each.ahead == ahead] for ahead in (0, 1, 3)}
)


def spread(count: int, most: int | None) -> Sequence[int]:
    """All of so many places; or one in each of `most` equal stretches, the same each time."""
    if most is None or count <= most:
        return range(count)
    draw = Random(count)
    return [draw.randrange(each * count // most, (each + 1) * count // most) for each in range(most)]


@contextmanager
def disturbed(setting: Setting, how: str) -> Generator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"{setting}: {how}")
        raise


def summary(folder: Path) -> dict[str, object]:
    return msgspec.json.decode((folder / "run/summary.json").read_bytes(), type=dict[str, object])


def check_kept(folder: Path, setting: Setting) -> None:
    found = audit_run(folder / "run")
    assert found.status == "finished"
    assert found.holds, [verdict.breaches for verdict in found.verdicts]
    assert found.steps == STEPS
    assert found.versions.largest is not None
    assert found.versions.largest <= setting.ahead
    assert not found.prompts.all_missing
    diary = msgspec.json.decode((folder / "run/model/diary.json").read_bytes(), type=list[list[int]])
    updates = Counter(chain.from_iterable(diary))
    assert len(found.prompts.trained) == len(updates) == STEPS * PROMPTS
    assert len(diary) == 2 * STEPS, "a step has two updates"
    step_of = {group: number // 2 for number, groups in reversed([*enumerate(diary)]) for group in groups}
    assert all(step_of[group] == number // 2 for number, groups in enumerate(diary) for group in groups)


def outcome(folder: Path, setting: Setting) -> dict[str, object]:
    run = folder / "run"
    return {
        **{name: lines(run / name) for name in ("metrics.jsonl", "samples.jsonl")},
        # What an evaluation finds for which nothing waits hangs on when it draws.
        "evaluations": [row["step"] if setting.meanwhile else row for row in lines(run / "evaluations.jsonl")],
        "summary": {key: told for key, told in summary(folder).items() if key not in ("wall_s", "restarts")},
        "model": {path.name: path.read_bytes() for path in sorted((run / "model").iterdir())},
        "states": {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.glob("checkpoints/*/*/*"))},
        "files": sorted(path.name for path in run.iterdir() if not path.name.startswith("events-")),
    }
