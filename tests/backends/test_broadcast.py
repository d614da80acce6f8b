"""Weights that a policy's ranks broadcast: they come whole whatever the layout is, by each way, or it is told."""

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from meshrl.errors import ModelError
from meshrl_hf import broadcast, collective
from meshrl_hf.boxes import Box
from meshrl_hf.collective import IN_FLIGHT, KEPT, Asked, Flight, Line
from meshrl_hf.fingerprints import fingerprint
from meshrl_hf.live_weights import LiveWeights, offered
from meshrl_hf.offer import Part
from meshrl_hf.reach import Where
from meshrl_hf.reading import Reader
from meshrl_inference.assembly import read
from meshrl_inference.naming import Naming
from tests.backends.material import SHAPE
from tests.senders import Senders, sending

LIMIT = 1 << 10
GLOO, MEMORY = "by gloo", "through shared memory"


class Places:
    """A model whose tensors a reader fills."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.device = torch.device("cpu")
        self._tensors = tensors

    def begin(self) -> None:
        """Nothing is kept of an attempt that failed."""
        for tensor in self._tensors.values():
            tensor.zero_()

    def place(self, part: Part) -> Tensor:
        ends = [start + length for start, length in zip(part.offsets, part.shape, strict=True)]
        return self._tensors[part.name][tuple(map(slice, part.offsets, ends))]

    def arrived(self, part: Part) -> None:
        """It is where it belongs."""


def received(reader: Reader, weights: LiveWeights, places: Mapping[str, Tensor]) -> str:
    """How a reader got weights, at its first attempt."""
    failed: list[str] = []
    way = reader.read(weights.offer, 1, Places(places), lambda _, error: failed.append(error))
    assert not failed
    return way


@pytest.fixture(params=[GLOO, MEMORY, "through the first rank"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Senders]:
    """Five ranks, more than sets of readers are kept. Readers are elsewhere, or near all of them, or near one."""
    if request.param == GLOO:
        monkeypatch.setenv("MESHRL_HANDOVER", "0")
    with sending(KEPT + 1, LIMIT) as made:
        if request.param == "through the first rank":
            for sender in made.each:
                sender._policy[1:] = [Where("elsewhere")] * KEPT
        yield made


def tensors(version: int, ranks: int) -> dict[str, Tensor]:
    """Tensors in many buckets, in one that is not full, in none of some ranks, and of no dimension's usual size."""
    torch.manual_seed(version)
    shapes = {
        "many": (7 * ranks, LIMIT // 4), "nearly a bucket": (ranks, LIMIT // 4 // 6), "few": (2, 5), "number": (1,),
        "odd": (999, 5), "experts": (6, 3, 70),
    }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_weights_come_whole_to_readers_in_turn_and_at_once_into_tensors_of_any_strides(policy: Senders) -> None:
    readers = [Reader() for _ in range(KEPT + 1)]  # as processes of their own would have: more than are kept
    ways: set[str] = set()
    for version in range(2):
        known = tensors(version, len(policy.each))
        weights = policy.offer(known, version)
        assert max(layout.nbytes for each in weights.offer.sources for layout in each.layouts) <= 2 * LIMIT // IN_FLIGHT
        for number, reader in enumerate([*readers, Reader()]):
            places = {name: torch.zeros_like(each) for name, each in known.items()}
            if number % 2:
                places["nearly a bucket"] = torch.zeros(known["nearly a bucket"].shape[::-1]).T
            ways.add(received(reader, weights, places))
            for name, place in places.items():
                assert torch.equal(place, known[name]), name
    own = [{name: torch.zeros_like(each) for name, each in known.items()} for _ in range(3)]
    with ThreadPoolExecutor() as at_once:
        ways.update(at_once.map(lambda places: received(Reader(), weights, places), own))
    assert all(torch.equal(place, known[name]) for each in own for name, place in each.items())
    assert ways <= {GLOO, MEMORY}


def test_ranks_with_more_buckets_than_others_keep_nobody_waiting_and_round_to_their_dtype(policy: Senders) -> None:
    parts = [torch.randn(3000), *(torch.randn(2, dtype=torch.bfloat16) for _ in policy.each[1:])]
    boxes = [Box(str(rank), tuple(each.shape), (0,), each) for rank, each in enumerate(parts)]
    offers = [offered(sender, 0, None, [box]) for sender, box in zip(policy.each, boxes, strict=True)]
    places = {str(rank): torch.zeros(each.shape) for rank, each in enumerate(parts)}
    LiveWeights.join(offers).pour(places, lambda: None)
    assert all(torch.equal(place, part.float()) for place, part in zip(places.values(), parts, strict=True))


def test_tensors_of_damaged_buckets_are_named_and_the_next_weights_arrive(
    policy: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: torch.randn(2 * len(policy.each), LIMIT // 4) for name in ("first", "third")}
    known = {"first": known["first"], "second": torch.full_like(known["first"], 7.0), "third": known["third"]}
    places = {name: torch.zeros_like(each) for name, each in known.items()}

    def of_others(content: Tensor) -> Tensor:
        """What a sender tells, as if the reader had got a bit of `second` otherwise."""
        return fingerprint(content) ^ int((content.view(torch.float32) == 7.0).any())

    with monkeypatch.context() as patch:
        patch.setattr(broadcast, "fingerprint", of_others)
        with pytest.raises(ModelError, match=r"version 0 did not .* sent: tensors in damaged buckets: 1 \(second\)"):
            policy.offer(known, 0).pour(places, lambda: None)
    policy.offer(known, 1).pour(places, lambda: None)
    assert all(torch.equal(place, known[name]) for name, place in places.items())


@pytest.mark.parametrize("experts", [0, 4])
def test_an_engine_loads_the_tensors_of_a_layer_when_all_have_come_as_they_are_in_files(
    policy: Senders, tmp_path: Path, experts: int
) -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=experts) if experts else LlamaConfig(**SHAPE)
    config.save_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_config(config)
    known, naming = dict(network.named_parameters()), Naming(str(tmp_path))
    loaded: list[dict[str, Tensor]] = []

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        loaded.append(dict(tensors))

    offer = policy.offer(known, 0).offer
    outcome = read(offer, 1, naming, torch.device("cpu"), loaded.clear, load)
    assert outcome.begun
    assert outcome.way in (GLOO, MEMORY)
    came = {name: tensor for each in loaded for name, tensor in each.items()}
    assert {name: list(each.shape) for name, each in came.items()} == naming.filed()
    for name, tensor in naming.in_files(known.items()):
        assert torch.equal(came[name], tensor)
    layers = [each for each in loaded if any(".layers." in name for name in each)]
    assert len(layers) == 2
    policy.end()
    gone = read(offer, 1, naming, torch.device("cpu"), loaded.clear, load)
    assert (gone.way, gone.begun, gone.lost) == ("", False, "the policy's ranks")


class Sent(NamedTuple):
    """A bucket that arrives when somebody waits for it, and must then be as it was."""

    content: Tensor
    number: int
    order: list[int]

    def wait(self) -> None:
        """Look at every byte."""
        assert (self.content == self.number).all()
        self.order.append(self.number)


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans(), st.booleans()), max_size=40))
def test_memory_of_buckets_in_flight_is_not_written_until_they_are_done(sizes: list[tuple[int, bool, bool]]) -> None:
    flight, order, done, told = Flight(), list[int](), list[int](), list[int]()
    flight.begin(max((nbytes for nbytes, _, _ in sizes), default=0), torch.device("cpu"), shared=True)

    def end(content: Tensor, number: int) -> None:
        assert (content == number).all()
        done.append(number)

    for number, (nbytes, staged, relayed) in enumerate(sizes):
        content = flight.memory(nbytes) if staged else torch.empty(nbytes, dtype=torch.uint8)
        content.fill_(number)
        arrived = partial(told.append, number) if relayed else None
        flight.add(cast("Any", Sent(content, number, order)), partial(end, content, number), arrived)
        assert len(done) > number - IN_FLIGHT
    flight.end()
    assert order == done == list(range(len(sizes)))
    assert told == [number for number, (_, _, relayed) in enumerate(sizes) if relayed]


class Dying:
    """A reader's connection to the store: the reader is killed before the second thing that it does there."""

    def __init__(self, store: Any) -> None:
        self._store, self._did = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        def do(*said: object) -> object:
            if self._did:
                raise KeyboardInterrupt
            self._did.append(name)
            return getattr(self._store, name)(*said)

        return do


def test_a_reader_that_dies_while_it_asks_does_not_keep_the_policy_from_its_next_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sending(KEPT + 1, LIMIT) as policy:
        policy.offer(tensors(0, len(policy.each)), 0)
        line, said = Line(policy.each[0].place), json.dumps(Asked("reader/0", 2, [], Where.of(torch.device("cpu"))))
        line.store = cast("Any", Dying(line.store))
        with suppress(KeyboardInterrupt):
            line.ask("names/1", said)
        for module in (broadcast, collective):
            monkeypatch.setattr(module, "STUCK", timedelta(seconds=1))  # the sender waits for it, because it has asked
        policy.end()
