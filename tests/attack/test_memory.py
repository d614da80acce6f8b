"""What grows with a run's length, and what outlives it."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl import Actor, Batch, CrossEntropy, Mesh, PolicyConfig, Ragged, Resources, Same, each, endpoint
from meshrl.engines.hosting import CYCLE, Ask, CallerQueue
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.channel import label
from meshrl.events import EventLog, Gauge
from meshrl.mesh import pool
from meshrl.testing import FakePolicy


def test_names_of_calls_come_again() -> None:
    """Ray keeps kilobytes for each name."""
    names = {label(Ask("update", "key", "line", number), whole=False) for number in range(10 * CYCLE)}
    assert len(names) == CYCLE


@given(st.lists(st.tuples(st.integers(1, CYCLE // 2), st.randoms(use_true_random=False), st.booleans()), max_size=8))
def test_a_number_is_known_by_its_rest(rounds: list[tuple[int, Random, bool]]) -> None:
    """Calls come in any order, up to half a cycle of them without an answer; one may be cancelled before it comes."""
    queue = CallerQueue()
    sent = 0
    for count, random, cancels in rounds:
        coming = list(range(sent, sent + count))
        sent += count
        random.shuffle(coming)
        if cancels:
            queue.cancel(coming[-1])
        come = set[int]()
        for number in coming:
            assert queue.whole(number % CYCLE) == number
            come.add(number)
            while queue._next in come:
                queue.start(queue._next)
        queue._dropped.clear()


def test_the_newest_events_are_kept_and_no_more(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", most=4096)
    for number in range(1000):
        log.emit(Gauge("number", 0.0, float(number)))
        if number % 7 == 0:
            log.flush()
    log.close()
    files = [tmp_path / "events-before.jsonl", tmp_path / "events.jsonl"]
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert sum(file.stat().st_size for file in files) <= 4096
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    assert len(lines) > 20
    assert '"value":999.0' in lines[-1]


async def test_a_fake_keeps_its_last_batches() -> None:
    policy = FakePolicy(PolicyConfig(backend="fake", model="none"))
    tokens = Ragged.of([[1, 2]], np.int32)
    batch = Batch.of(tokens=tokens, loss_mask=Ragged(np.array([False, True]), tokens.offsets))
    for _ in range(300):
        await policy.update(batch, CrossEntropy())
    assert len(policy.updates) == 256
    assert policy.version == 300


class Writes(Actor):
    @endpoint
    async def write(self) -> Same[str]:
        writing = pool.write(1 << 20)
        assert writing is not None
        return writing.done().path


@pytest.mark.process
@pytest.mark.usefixtures("ray_cluster")
async def test_a_mesh_that_ends_leaves_no_shared_memory() -> None:
    engine = RayEngine()
    mesh = await Mesh.reserve(engine, 2, Resources(cpus=0))
    made = [Path(path) for path in await each((await mesh.spawn(Writes)).write)()]
    assert [path.exists() for path in made] == [True, True]
    await mesh.stop()
    assert not any(path.exists() for path in made)
    await engine.close()
