"""Runs that are killed at any moment, in virtual time: no prompt is lost or trained twice, and the bound holds."""

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from structlog.testing import capture_logs

import meshrl as rl
from meshrl.run import MeshConfig, audit_run
from meshrl.testing import FakePolicy, FakeSampler, Lognormal, delayed, simulate

SIZE, PROMPTS = 3, 26
TASK = rl.Task(
    train=rl.Batch.of(prompt=[f"{n}+1=" for n in range(PROMPTS)], answer=["?" * (n % 4) for n in range(PROMPTS)]),
    held_out=rl.Batch.of(prompt=[]),
)


@dataclass
class Story:
    """What counts of a run and of those that went on from it: what came after a checkpoint is forgotten with it."""

    ahead: int
    source: str
    keeps: int
    """A group in so many is dropped."""
    later: bool
    """Whether it goes on while a checkpoint is written."""
    steps: int = 12
    loops: int = 1
    size: int = SIZE
    task: rl.Task = TASK
    trained: list[tuple[list[int], list[object]]] = field(default_factory=list)
    """By step: the groups of its rows, and what was generated."""
    ended: bool = False

    async def script(self, run: rl.Run) -> None:
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(backend="fake", model="none"))
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
        await rl.publish(policy, sampler)
        prompts = self.prompts(run)
        if self.source == "no stream":
            async for step in run.steps(self.steps):
                rows = next(prompts)
                encoded = await policy.encode(rows.assign(completion=rows["answer"]))
                await self.train(run, policy, step, encoded)
        for before in range(0, self.loops * self.steps, self.steps) if self.source != "no stream" else ():
            async with rl.rollouts(sampler, prompts, rl.Sampling(n=2), ahead=self.ahead, keep=self.keep) as stream:
                async for step in run.steps(self.steps):
                    if (batch := await anext(stream, None)) is None:
                        break
                    version = (await policy.weights()).version
                    assert version == before + step
                    assert version - batch.row("oldest_version").min() <= self.ahead, "too old"
                    await self.train(run, policy, before + step, batch)
                    await rl.publish(policy, stream)
        self.ended = True

    async def train(self, run: rl.Run, policy: rl.Policy, step: int, batch: rl.Batch) -> None:
        del self.trained[step:]
        await run.record(await policy.update(batch, rl.CrossEntropy()), batch)
        self.trained.append((batch.groups.tolist(), list(batch.objects("completion"))))

    def prompts(self, run: rl.Run) -> Iterator[rl.Batch]:
        dealt = self.task.batches(self.size, run.seed)
        if self.source == "finite":
            return iter([next(dealt) for _ in range(PROMPTS // SIZE)])
        return early(dealt) if self.source == "wrapped" else dealt

    def keep(self, batch: rl.Batch) -> NDArray[np.bool_]:
        return np.not_equal(batch.groups % self.keeps, self.keeps - 1)

    def go_on(self, folder: str, until: float, seed: int, resolved: Mapping[str, object] | None = None) -> None:
        async def main() -> None:
            meshes = {"main": MeshConfig(cpus=0)}
            config = rl.RunConfig(folder=folder, meshes=meshes, checkpoint_every=2, resume=True)
            config = config.model_copy(update={"checkpoint_async": self.later})
            async with asyncio.timeout(until), rl.Run(config, resolved) as run:
                await self.script(run)

        try:
            simulate(main, seed=seed)
        except TimeoutError:
            assert not self.ended


@pytest.fixture(autouse=True)
def _roles(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Lognormal(0.1, 1)
    policy = delayed(Learner, update=Lognormal(1, 0.5), weights=short, checkpoint=short, restore=short)
    monkeypatch.setattr("meshrl.testing.FakePolicy", policy)
    monkeypatch.setattr("meshrl.testing.FakeSampler", delayed(FakeSampler, generate=Lognormal(0.3, 1), load=short))
    # What each of many runs would pay for again: a real disk, and backends of all packages.
    own = [metadata.distribution("meshrl")]
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: own)
    monkeypatch.setattr("os.fsync", lambda _: None)


class Learner(FakePolicy):
    def __init__(self, config: rl.PolicyConfig) -> None:
        super().__init__(config, skill=0.5, rate=0.01)


def early(batches: Iterator[rl.Batch]) -> Iterator[rl.Batch]:
    coming = next(batches)
    while True:
        batch, coming = coming, next(batches)
        yield batch


SOURCES = ("dealt", "wrapped", "finite", "no stream")
KILLS = st.lists(st.floats(0.5, 20), max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [6, pytest.param(60, marks=pytest.mark.wide)])
def test_each_prompt_is_trained_once_or_dropped(examples: int) -> None:
    ahead, keeps = st.sampled_from([0, 0, 1, 2, 3]), st.sampled_from([1000, 3])
    stories = st.tuples(ahead, st.sampled_from(SOURCES), keeps, st.booleans())
    settings(max_examples=examples)(given(stories, KILLS, st.integers(0, 1000))(check))()


def check(drawn_story: tuple[int, str, int, bool], kills: list[float], seed: int) -> None:
    ahead, source, keeps, _ = drawn_story
    story, whole = Story(*drawn_story), Story(*drawn_story)
    with capture_logs(), tempfile.TemporaryDirectory() as folder:
        for number, until in enumerate([*kills, 10_000]):
            if not story.ended:
                story.go_on(folder, until, seed + number)
        whole.go_on(str(Path(folder, "whole")), 10_000, seed)
        told = [audit_run(Path(folder, part, "run")) for part in ("", "whole")]
    assert story.ended
    assert whole.ended
    for audit in told:
        assert audit.holds, [verdict.breaches for verdict in audit.verdicts]
    groups = [group for step, _ in story.trained for group in dict.fromkeys(step)]
    assert len(groups) == len(set(groups)), "no prompt is trained twice"
    assert all(len(step) == len(set(step)) * (1 if source == "no stream" else 2) for step, _ in story.trained)
    drawn = PROMPTS // SIZE * SIZE if source == "finite" else max(groups)
    missing = set(range(drawn)) - set(groups)
    if source != "no stream":
        missing -= {group for group in missing if group % keeps == keeps - 1}
    under_way = 0 if source in ("finite", "no stream") else ahead * SIZE
    assert len(missing) <= under_way, "what was drawn is trained, but for what runs at the end"
    assert len(told[0].prompts.trained) == len(groups)
    if not ahead or source == "no stream":
        assert story.trained == whole.trained
