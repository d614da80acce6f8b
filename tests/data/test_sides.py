"""R, T and C of hand-made timelines: which side had a rank's time, what bounded a step, how many ranks were busy."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.events import Event, Span, Step, Wait
from meshrl.observe.analysis import overlap
from meshrl.observe.page import make_content
from meshrl.observe.run_files import Record


def span(mesh: str, endpoint: str, began: float, ended: float, rank: int = 0) -> Span:
    return Span(0, mesh, rank, "Actor", endpoint, began, ended)


def test_calls_that_share_a_rank_overlap_nothing() -> None:
    update, step = span("main", "update", 0, 8), Step(0, 0, 8)
    shared: list[Event] = [update, span("main", "generate", 0, 8), step]
    found = overlap(shared)
    assert found.efficiency == 0.5
    assert (found.total.rollout, found.total.training) == (4, 4)
    assert (found.total.both, found.total.rollout_alone, found.total.training_alone) == (0, 4, 4)
    apart = overlap([span("rollout", "generate", 0, 8), *shared]).total
    assert (apart.rollout, apart.training, apart.both, apart.rollout_alone) == (8, 4, 4, 4)
    two = overlap([span("rollout", "generate", 0, 8), span("rollout", "generate", 2, 6), update, step]).total
    assert (two.rollout, two.training, two.both) == (8, 8, 8)


def test_a_slow_judge_bounds_a_step_and_one_busy_sampler_of_eight_is_told() -> None:
    events: list[Event] = []
    for number, now in enumerate((0.0, 10.0)):
        events += [span("judge", "score", now, now + 10), span("rollout", "generate", now, now + 2)]
        events += [span("main", "update", now, now + 1), Wait("trainer", "a batch", "", now + 1, now + 10)]
        events += [span("rollout", "load", now + 4, now + 5), Step(number, now, now + 10)]
    found = overlap(events)
    assert found.efficiency == 1
    for step in found.steps:
        assert (step.rollout, step.training, step.scoring, step.bound) == (2, 1, 10, "scoring")
        assert (step.both, step.rollout_alone, step.scoring_alone, step.sync, step.other) == (1, 1, 8, 0, 0)
    events = [span("rollout", "generate", 0, 1.5 if rank else 10, rank) for rank in range(8)]
    events += [span("main", "update", 0, 3), Wait("trainer", "a batch", "", 3, 10), Step(0, 0, 10)]
    found = overlap(events)
    assert found.efficiency == 1
    assert found.busy == pytest.approx({"rollout": 20.5 / 80, "training": 0.3})
    assert make_content(Record(Path("uneven"), events=events)).busy == pytest.approx(found.busy)


ENDS = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)
MESHES, CALLS = st.sampled_from(["main", "rollout"]), st.sampled_from(["generate", "update", "score", "load"])
SPANS = st.builds(
    lambda mesh, name, ends, rank: span(mesh, name, ends[0], ends[1], rank), MESHES, CALLS, ENDS, st.integers(0, 1)
)
WAITS = st.builds(lambda ends: Wait("trainer", "a batch", "", ends[0], ends[1]), ENDS)


@given(st.lists(SPANS, max_size=10), st.lists(WAITS, max_size=2))
def test_the_parts_of_a_step_add_up_to_it(spans: list[Span], waits: list[Wait]) -> None:
    found = overlap([*spans, *waits, Step(0, 1, 8), Step(1, 8, 20)])
    for step in found.steps:
        parts = (step.both, step.rollout_alone, step.training_alone, step.scoring_alone, step.sync, step.other)
        assert sum(parts) == pytest.approx(step.seconds)
        assert min(parts) >= -1e-9
        assert step.both + step.training_alone == pytest.approx(step.training)
        assert step.both <= step.rollout + 1e-9
    assert 0 <= found.efficiency <= 1 + 1e-9
    assert all(0 <= share <= 1 + 1e-9 for share in found.busy.values())
