"""Weights: frozen tensors with a version, in buckets, what the log says of their route, and what is sent as changes."""

import asyncio
import copy
import gc
import pickle
from collections.abc import Sequence
from random import Random
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from meshrl.data import ArrivalLog, Probe, Ragged, Weights, WeightSource
from meshrl.errors import DataError
from meshrl.mesh import Rank, Ref, rank_context
from meshrl.mesh.shared_memory import FOLDER


def tensors(dtype: type = np.float32) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    return {"embed": np.arange(6).reshape(2, 3).astype(dtype), "scale": np.array(2).astype(dtype), "none": np.empty(0)}


def test_equal_weights_have_equal_fingerprints_and_stay_the_same_from_another_byte_order() -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.int64):
        one, two = Weights(3, tensors(dtype)), Weights(3, dict(reversed(tensors(dtype).items())))
        assert one == two
        assert one.fingerprint() == two.fingerprint() == one.fingerprint()
        assert len(one.fingerprint()) == 32
        assert one.tensors["scale"].shape == ()
    for order in (">f4", ">i8", "<f8"):
        (found,) = Weights(0, {"values": np.arange(5).astype(order)}).tensors.values()
        assert found.dtype.isnative
        assert found.tolist() == [0, 1, 2, 3, 4]


def test_names_dtypes_and_shapes_count_for_a_fingerprint_and_a_version_for_the_value_alone() -> None:
    values = np.zeros(6, np.float32)
    different: list[dict[str, np.ndarray]] = [
        {"a": values},
        {"b": values},
        {"a": values.reshape(2, 3)},
        {"a": np.zeros(6, np.int32)},
        {"a": values[:3], "b": values[3:]},
        {},
    ]
    assert len({Weights(0, each).fingerprint() for each in different}) == len(different)
    one = Weights(1, tensors())
    two = one.with_version(2)
    assert two.version == 2
    assert two.fingerprint() == one.fingerprint()
    assert two != one
    assert two.with_version(1) == one
    assert np.shares_memory(two.tensors["embed"], one.tensors["embed"])
    assert one != "weights"


def test_nothing_can_be_written_and_size_and_refusals_are_told() -> None:
    memory = np.zeros(4, np.float32)
    weights = Weights(0, {"view": memory[:2], "own": np.zeros(2)})
    memory[0] = 9
    assert weights.tensors["view"].tolist() == [0, 0]
    for array in weights.tensors.values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(TypeError):
        weights.tensors["own"] = memory  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    assert copy.deepcopy(weights) is weights
    assert repr(Weights(4, tensors())) == "Weights(version 4, 3 tensors, 28 bytes)"
    with pytest.raises(DataError, match="weight `names` has dtype <U1"):
        Weights(0, {"names": np.array(["a"])})


def test_tensors_of_several_buckets_are_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Weights(1, tensors())
    monkeypatch.setattr("meshrl.data.weights.BUCKET", 20)  # in place of 256 MiB
    several = Weights.streamed(1, iter(tensors().items()))
    assert [list(bucket.index) for bucket in several.buckets] == [["embed"], ["scale", "none"]]
    assert several == whole
    assert list(several.tensors) == list(whole.tensors)


def test_ranks_make_one_model_of_their_parts_or_disagree() -> None:
    probe = Probe(Ragged.of([[0, 0]], np.int32), np.zeros(1, np.float32))
    names = list(tensors())
    parts = [Weights.streamed(2, [(name, tensors()[name])], probe) for name in names]
    joined = Weights.join([*parts, Weights(2, {})])
    assert joined == Weights(2, tensors())
    assert joined.probe is parts[0].probe
    replicas = Weights.join([Weights(2, tensors())] * 2)
    assert replicas == joined
    assert len(replicas.buckets) == 1, "what two ranks have is sent once"
    changed = {**tensors(), "scale": np.array(3, np.float32)}
    with pytest.raises(DataError, match="the ranks 0 and 1 have different tensors `scale`"):
        Weights.join([Weights(2, tensors()), Weights(2, changed)])
    with pytest.raises(DataError, match=r"versions \[2, 3\]"):
        Weights.join([Weights(2, tensors()), Weights(3, tensors())])


def put(value: object) -> Ref:
    raise AssertionError("what lies in shared memory is put nowhere else")


def sent(weights: Weights) -> Weights:
    """As another process of this machine is given them."""
    data = pickle.dumps(weights.hold(put, 0, shares=True))
    assert len(data) < 1000
    received = pickle.loads(data)  # noqa: S301 -- what was pickled here
    assert isinstance(received, Weights)
    return received


@pytest.mark.skipif(not FOLDER.is_dir(), reason="this machine shares no memory between processes")
async def test_large_ones_are_shared_by_the_processes_of_a_machine() -> None:
    weights = Weights(5, {"large": np.arange(1 << 19, dtype=np.float32)})
    received = sent(weights)
    with pytest.raises(DataError, match=r"await weights\.load"):
        _ = received.tensors
    loaded = await received.load()
    assert loaded == weights
    assert loaded.transports == {"shared memory"}
    assert (loaded.tensors["large"] == np.arange(1 << 19)).all()
    assert await sent(loaded).load() == weights
    lost = pickle.dumps(weights.hold(put, 0, shares=True))
    del weights, received, loaded
    for value in range(2):
        Weights(6, {"large": np.full(1 << 19, value, np.float32)})
        gc.collect()
    gone = pickle.loads(pickle.dumps(pickle.loads(lost)))  # noqa: S301 -- handed on, as by a controller
    with pytest.raises(DataError, match="gone"):
        await gone.load()
    shared = Weights(5, tensors()).shared()
    assert shared == Weights(5, tensors())
    assert all(bucket.segment and not bucket.damaged() for bucket in shared.buckets)


class Arrived(Weights):
    route = "memory"

    @property
    def transports(self) -> frozenset[str]:
        return frozenset((self.route,))


def test_a_transport_is_said_with_its_reason_once_and_again_when_it_changes() -> None:
    arrivals = ArrivalLog()
    reasons = {
        "collectives": "the policy is on another machine",
        "the object store": "the policy is on another machine, and collectives do not carry these weights",
        "shared memory": "the policy is on this machine",
        "changes through the object store": 'policy.weight_sync = "delta"',
        "broadcast by gloo": 'policy.weight_sync = "broadcast"',
    }
    with capture_logs() as said:
        for version, route in enumerate(["collectives", *reasons, "collectives"]):
            weights = Arrived(version, {"one": np.ones(2, np.float32)})
            weights.route = route
            arrivals.note(weights)
    assert [line["version"] for line in said] == [0, 2, 3, 4, 5, 6]
    routes = [*reasons, "collectives"]
    assert [(line["by"], line["because"]) for line in said] == [(route, reasons[route]) for route in routes]


SIZE = 5000


class Stored(Ref):
    """A value in another process: fetched as it is pickled, and counted."""

    fetches: ClassVar[list[int]] = []

    def __init__(self, value: object) -> None:
        self.data = pickle.dumps(value)

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        data = [each.data for each in held if isinstance(each, Stored)]
        cls.fetches += map(len, data)
        return [pickle.loads(each) for each in data]  # noqa: S301 -- what was stored here


def of_another(weights: Weights) -> Weights:
    Stored.fetches.clear()
    received = pickle.loads(pickle.dumps(weights.hold(Stored, 100, shares=False)))  # noqa: S301 -- our own
    assert isinstance(received, Weights)
    return received


@given(st.binary(max_size=200), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_change_gives_every_bit(data: bytes, changes: int, random: Random) -> None:
    sender, old = WeightSource(changes=True), np.frombuffer(data, np.uint8)
    new = old.copy()
    for _ in range(changes if len(new) else 0):
        new[random.randrange(len(new))] ^= np.uint8(1 << random.randrange(8))
    for version, values in enumerate((old, new, old)):
        loaded = asyncio.run(of_another(sender.weights(version, [("values", values)], None)).load())
        assert loaded.tensors["values"].tobytes() == values.tobytes()


async def test_who_has_a_version_fetches_what_changed_since() -> None:
    sender, values = WeightSource(changes=True), np.arange(SIZE, dtype=np.float32)
    versions: list[Weights] = []
    for version in range(4):
        values[version * 10 : version * 10 + 10] += 1
        versions.append(sender.weights(version, [("values", values)], None))
    travelled = [of_another(each) for each in versions]
    first = await travelled[0].load()
    assert sum(Stored.fetches) > SIZE * 4
    for version in (1, 3):
        loaded = await travelled[version].load()
        assert loaded == versions[version]
        assert loaded.tensors["values"].tobytes() == versions[version].tensors["values"].tobytes()
        assert not any(bucket.damaged() for bucket in loaded.buckets)
    assert sum(Stored.fetches) - SIZE * 4 < SIZE, "three changes, of a bit for each 16"
    assert first.tensors["values"].tobytes() == versions[0].tensors["values"].tobytes(), "what he has stays"
    assert (await travelled[0].load()) == versions[0], "also an older one, anew"
    assert versions[3].buckets[0].nbytes == SIZE * 4


async def test_what_changes_as_a_whole_is_sent_as_a_whole_and_a_history_does_not_grow_without_end() -> None:
    sender, random = WeightSource(changes=True), np.random.default_rng(0)
    for version in range(3):
        values = random.standard_normal(SIZE).astype(np.float32)
        loaded = await of_another(sender.weights(version, [("values", values)], None)).load()
        (fetched,) = Stored.fetches
        assert SIZE * 4 < fetched < SIZE * 4 + 1000, "a change would say which words, too"
        assert loaded.tensors["values"].tobytes() == values.tobytes()
    sender, values = WeightSource(changes=True), np.zeros(SIZE, np.float32)
    sizes: list[int] = []
    for version in range(40):
        values[:400] = version
        weights = sender.weights(version, [("values", values.copy())], None)
        assert await of_another(weights).load() == weights
        sizes.append(sum(Stored.fetches))
    assert sum(size > SIZE * 4 for size in sizes) > 1, "it begins anew"
    assert sum(size < SIZE * 2 for size in sizes) > 30


async def test_another_model_is_another_history() -> None:
    for changes in (True, False):
        sender = WeightSource(changes=changes)
        for names in (["a", "b"], ["b"], ["a"]):
            weights = sender.weights(0, [(name, np.zeros(SIZE)) for name in names], None)
            assert list(weights.tensors) == names
            assert await of_another(weights).load() == weights


async def test_each_rank_sends_what_changed_of_its_own() -> None:
    senders: list[WeightSource] = []
    for rank in range(2):
        token = rank_context.set(Rank(index=rank, size=2, axes={"dp": rank}, shape={"dp": 2}))
        senders.append(WeightSource(changes=True))
        rank_context.reset(token)
    for version in range(3):
        values = [np.full(SIZE, rank + (version == 2), np.float32) for rank in range(2)]
        parts = [each.weights(version, [(f"values{rank}", values[rank])], None) for rank, each in enumerate(senders)]
        whole = Weights.join(parts)
        assert await of_another(whole).load() == whole
        if version == 1:
            assert sum(Stored.fetches) < SIZE, "nothing has changed but the version"
