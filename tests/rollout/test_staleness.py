"""The arithmetic of the bound, over every order of events that a stream can see."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.errors import DataError
from meshrl.rollout.staleness import Late, StalenessLedger


def drawn(ledger: StalenessLedger, first: int) -> list[int]:
    labels = list(range(first, first + ledger.room))
    for label in labels:
        ledger.draw(label)
    return labels


def publish(ledger: StalenessLedger, weights: int) -> None:
    ledger.check(weights)
    if ledger.announce():
        ledger.publish(weights)


@given(
    size=st.integers(1, 4),
    ahead=st.integers(0, 4),
    late=st.sampled_from(["wait", "drop"]),
    loss=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_whatever_finishes_when_nothing_trained_is_older_than_the_bound(
    size: int, ahead: int, late: Late, loss: float, seed: int
) -> None:
    chance = random.Random(seed)
    ledger = StalenessLedger(size, ahead, late)
    weights, labels, trained, restarted = 0, 0, list[int](), 0
    started: dict[int, int] = {}
    while ledger.batches < 12:
        new = drawn(ledger, labels)
        labels += len(new)
        started |= dict.fromkeys(new, weights)
        assert ledger.delivered + len(ledger.groups) == ledger.capacity
        running = [label for label, group in ledger.groups.items() if not group.finished]
        if running and (chance.random() < 0.7 or ledger.ready < size):
            label = chance.choice(running)
            if chance.random() < loss:
                ledger.restart(label)
                restarted += 1
            elif chance.random() < loss:
                ledger.drop([label], "filtered")
            else:
                ledger.finish(label, started[label])
        stale = ledger.too_old()
        assert not stale or late == "drop" or loss
        ledger.drop(stale, "stale")
        taken = ledger.take()
        if taken is not None:
            assert len(taken) == size
            assert taken == sorted(taken)
            trained += taken
            assert all(weights - started[label] <= ahead for label in taken)
            assert ledger.staleness([started[label] for label in taken]) == [
                weights - started[label] for label in taken
            ]
            weights += 1
            publish(ledger, weights)
    assert len(set(trained)) == len(trained) == 12 * size
    assert len(trained) + ledger.dropped.total() + len(ledger.groups) + restarted == labels


@given(size=st.integers(1, 5), ahead=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_a_ledger_whose_groups_are_all_finished_never_waits(size: int, ahead: int, seed: int) -> None:
    chance = random.Random(seed)
    ledger = StalenessLedger(size, ahead)
    labels = 0
    for weights in range(1, 12):
        new = drawn(ledger, labels)
        labels += len(new)
        for label in chance.sample(list(ledger.groups), len(ledger.groups)):
            if not ledger.groups[label].finished:
                ledger.finish(label, weights - 1)
        assert ledger.take() is not None
        publish(ledger, weights)


def test_a_batch_waits_for_a_group_that_would_be_too_old_for_the_next() -> None:
    ledger = StalenessLedger(size=2, ahead=1)
    first = drawn(ledger, 0)
    for label in first[1:]:
        ledger.finish(label, 0)
    assert ledger.take() == [1, 2]
    publish(ledger, 1)
    for label in drawn(ledger, 4):
        ledger.finish(label, 1)
    assert ledger.take() is None
    ledger.finish(0, 0)
    assert ledger.take() == [0, 3]
    assert ledger.waited == 1


def test_a_batch_that_may_drop_waits_for_nobody() -> None:
    ledger = StalenessLedger(size=2, ahead=1, late="drop")
    for label in drawn(ledger, 0)[1:]:
        ledger.finish(label, 0)
    assert ledger.take() == [1, 2]
    publish(ledger, 1)
    for label in drawn(ledger, 4):
        ledger.finish(label, 1)
    assert ledger.take() == [3, 4]
    publish(ledger, 2)
    ledger.finish(0, 0)
    assert ledger.too_old() == [0]
    ledger.drop([0], "stale")
    assert ledger.room == 3
    assert ledger.dropped == {"stale": 1}


def test_weights_whose_numbers_grow_by_several_are_one_version_each() -> None:
    ledger = StalenessLedger(size=1, ahead=1)
    publish(ledger, 7)
    drawn(ledger, 0)
    ledger.finish(0, 7)
    ledger.take()
    publish(ledger, 11)
    assert ledger.version == 1
    assert ledger.version_of(7) == 0
    assert ledger.version_of(11) == 1
    with pytest.raises(DataError, match="version 9 were published after those of version 11"):
        publish(ledger, 9)


def test_a_prompt_drawn_twice_is_refused() -> None:
    ledger = StalenessLedger(size=2, ahead=0)
    ledger.draw(5)
    with pytest.raises(DataError, match="group 5 was drawn again"):
        ledger.draw(5)


def test_a_publication_that_is_on_its_way_counts_for_the_bound_and_not_for_room() -> None:
    ledger = StalenessLedger(size=1, ahead=0)
    ledger.draw(0)
    ledger.finish(0, 0)
    assert ledger.announce()
    assert ledger.too_old() == [0]
    assert ledger.room == 0
    ledger.withdraw()
    assert ledger.take() == [0]


def test_publishing_twice_a_batch_gives_no_more_room() -> None:
    ledger = StalenessLedger(size=2, ahead=1)
    for label in drawn(ledger, 0):
        ledger.finish(label, 0)
    ledger.take()
    for weights in (1, 2, 3):
        publish(ledger, weights)
    assert ledger.room == 2
