"""Buckets of a broadcast in flight, who reads them, and which groups are kept."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.distributed_c10d import Store
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from meshrl import PolicyConfig
from meshrl.errors import ModelError
from meshrl_hf import broadcast, collective, live_weights
from meshrl_hf.boxes import Box
from meshrl_hf.broadcast import Hop
from meshrl_hf.buckets import Bucket
from meshrl_hf.collective import IN_FLIGHT, KEPT, Asked, Flight, Group, Groups, Line
from meshrl_hf.live_weights import LiveWeights, _InPlace, offered
from meshrl_hf.reach import Where
from meshrl_hf.reading import Reader
from meshrl_hf.roles import TrainedPolicy
from meshrl_inference.assembly import read
from meshrl_inference.naming import Naming
from tests.senders import Senders, sending

if TYPE_CHECKING:
    from meshrl_hf.broadcast import Sender
    from meshrl_hf.trainable import Trainable

LIMIT = 1 << 10


class Sent(NamedTuple):
    """A bucket that arrives when somebody waits for it, and must then be as it was."""

    content: torch.Tensor
    number: int
    order: list[int]

    def wait(self) -> None:
        """Look at every byte."""
        assert (self.content == self.number).all()
        self.order.append(self.number)


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=40))
def test_memory_of_buckets_in_flight_is_not_written_until_they_have_arrived(sizes: list[tuple[int, bool]]) -> None:
    flight, order = Flight(), list[int]()
    flight.begin(max((nbytes for nbytes, _ in sizes), default=0), torch.device("cpu"))
    for number, (nbytes, staged) in enumerate(sizes):
        content = flight.memory(nbytes) if staged else torch.empty(nbytes, dtype=torch.uint8)
        assert len(content) == nbytes
        content.fill_(number)
        flight.add(cast("dist.Work", Sent(content, number, order)))
    assert len(order) > len(sizes) - IN_FLIGHT
    flight.end()
    assert order == list(range(len(sizes)))


@given(st.lists(st.booleans(), max_size=40))
def test_memory_of_buckets_that_are_handed_over_is_not_written_until_they_are_done(relayed: list[bool]) -> None:
    flight, arrived, done = Flight(), list[int](), list[int]()
    flight.begin(8, torch.device("cpu"), shared=True)

    def end(content: torch.Tensor, number: int) -> None:
        assert (content == number).all()
        assert number in arrived or not relayed[number]
        done.append(number)

    for number, later in enumerate(relayed):
        content = flight.memory(8).fill_(number)
        assert content.data_ptr() == flight.slots.tensor[flight.slot].data_ptr()
        flight.add(None, partial(end, content, number), partial(arrived.append, number) if later else None)
        assert len(done) > number - IN_FLIGHT
    flight.end()
    assert done == list(range(len(relayed)))
    assert arrived == [number for number, later in enumerate(relayed) if later]


@pytest.mark.parametrize(
    ("device", "readers", "on_gpus"), [("cuda", (1, 1), True), ("cuda", (1, 0), False), ("cpu", (1, 1), False)]
)
def test_buckets_lie_on_gpus_if_the_policy_and_all_readers_are_there(
    device: str, readers: Sequence[int], on_gpus: bool
) -> None:
    store = cast("Any", dist).TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    line = Line(f"127.0.0.1:{store.port}")
    for number, on_gpu in enumerate(readers):
        where = Where("there", f"{number}" if on_gpu else "")
        line.ask("key", json.dumps(Asked(f"reader{number}/0", len(readers), [], where)))
    policy = [Where("here", "own" if device == "cuda" else "")]
    passing = broadcast._Passes(line, "key", [], policy).next()
    assert passing
    assert passing.device(torch.device("cuda:1")).type == ("cuda" if on_gpus else "cpu")


@pytest.fixture(params=["by gloo", "through shared memory", "through the first rank"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Senders]:
    """Five ranks, more than sets of readers are kept. Readers are elsewhere, or near all of them, or near one."""
    if request.param == "by gloo":
        monkeypatch.setenv("MESHRL_HANDOVER", "0")
    with sending(KEPT + 1, LIMIT) as made:
        if request.param == "through the first rank":
            for sender in made.each:
                sender._policy[1:] = [Where("elsewhere")] * KEPT
        yield made


by_gloo = pytest.mark.parametrize("policy", ["by gloo"], indirect=True)


def publish(policy: Senders, version: int) -> tuple[LiveWeights, torch.Tensor]:
    """Offer a matrix of which each rank has two rows, in buckets of parts of a row; and the matrix."""
    whole = torch.randn(2 * len(policy.each), LIMIT // 4)
    return policy.offer({"all": whole}, version), whole


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all groups that are made, by the sender and by the reader."""
    names, begin = list[str](), Group.__init__

    def noted(self: Group, store: Store, name: str, *rest: Any) -> None:
        names.append(name)
        begin(self, store, name, *rest)

    monkeypatch.setattr(Group, "__init__", noted)
    return names


@by_gloo
@pytest.mark.parametrize(("sets", "made"), [(1, 1), (2, 2), (KEPT + 1, 3 * (KEPT + 1))])
def test_groups_are_made_once_for_each_sender_of_at_most_four_sets_of_readers(
    policy: Senders, groups: list[str], monkeypatch: pytest.MonkeyPatch, sets: int, made: int
) -> None:
    readers = [Reader() for _ in range(sets)]
    for version in range(3):
        weights, known = publish(policy, version)
        for reader in readers:  # as processes of their own would
            monkeypatch.setattr(live_weights, "_reader", reader)
            place = torch.zeros_like(known)
            weights.pour({"all": place}, lambda: None)
            assert torch.equal(place, known)
    assert len(groups) == made * len(policy.each) * 2
    assert len(set(groups)) == made * len(policy.each)


def test_ranks_without_parts_keep_nobody_waiting(policy: Senders) -> None:
    for version in range(2):
        known = torch.randn(2, 5)  # of which only two ranks have a row
        place = torch.zeros_like(known)
        policy.offer({"all": known}, version).pour({"all": place}, lambda: None)
        assert torch.equal(place, known)


def test_buckets_leave_an_eighth_of_their_memory_free(policy: Senders) -> None:
    offer = policy.offer({"many": torch.randn(999, 5)}, 0).offer
    assert (
        max(layout.nbytes for source in offer.sources for layout in source.layouts) <= 2 * LIMIT * 7 // 8 // IN_FLIGHT
    )


@by_gloo
@pytest.mark.parametrize(
    ("dtype", "strided", "staged"),
    [(torch.float32, False, 0), (torch.bfloat16, False, KEPT + 1), (torch.float32, True, KEPT + 1)],
)
def test_a_large_part_is_staged_only_by_a_side_that_holds_it_in_another_form(
    policy: Senders, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, strided: bool, staged: int
) -> None:
    made, memory = list[int](), Flight.memory

    def noted(self: Flight, nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return memory(self, nbytes)

    monkeypatch.setattr(Flight, "memory", noted)
    known = torch.randn(len(policy.each), LIMIT // 4 // 6)  # each rank has a part, of nearly a bucket
    place = torch.zeros(known.shape[::-1]).T if strided else torch.zeros_like(known)
    policy.offer({"all": known.to(dtype)}, 0).pour({"all": place}, lambda: None)
    assert torch.equal(place, known.to(dtype).float())
    assert len(made) == staged


def test_tensors_of_buckets_that_change_are_named_and_the_next_weights_arrive(
    policy: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: torch.randn(2 * len(policy.each), LIMIT // 4) for name in ("first", "second", "third")}
    places = {name: torch.zeros_like(each) for name, each in known.items()}
    send = Hop.send_parts

    def told_of_others(self: Hop, number: int, bucket: Bucket, device: torch.device) -> torch.Tensor:
        return send(self, number, bucket, device) + (bucket.layout.parts[0].name == "second")

    with monkeypatch.context() as patch:
        patch.setattr(Hop, "send_parts", told_of_others)
        with pytest.raises(ModelError, match=r"version 0 did not .* sent: tensors in damaged buckets: 1 \(second\)"):
            policy.offer(known, 0).pour(places, lambda: None)
    policy.offer(known, 1).pour(places, lambda: None)
    assert all(torch.equal(place, known[name]) for name, place in places.items())


@by_gloo
def test_a_bit_that_flips_on_its_way_is_noticed(policy: Senders, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, send = torch.randn(2 * len(policy.each), LIMIT // 4), Group.broadcast

    def flipped(self: Group, tensor: torch.Tensor) -> dist.Work:
        if len(tensor) > 100 and threading.current_thread() is not threading.main_thread():  # which reads
            tensor = tensor.clone()
            tensor[77] ^= 4
        return send(self, tensor)

    monkeypatch.setattr(Group, "broadcast", flipped)
    with pytest.raises(ModelError, match="did not arrive as they were sent"):
        policy.offer({"all": whole}, 0).pour({"all": torch.zeros_like(whole)}, lambda: None)


@by_gloo
def test_a_sender_with_fewer_buckets_need_not_wait_for_the_others_ends(
    policy: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, send = list[int](), Group.broadcast

    def noted(self: Group, tensor: torch.Tensor) -> dist.Work:
        if threading.current_thread() is threading.main_thread():  # which reads
            sizes.append(len(tensor))
        return send(self, tensor)

    monkeypatch.setattr(Group, "broadcast", noted)
    tensors = [torch.randn(3000), *(torch.randn(2) for _ in policy.each[1:])]
    boxes = [Box(str(rank), tuple(each.shape), (0,), each) for rank, each in enumerate(tensors)]
    parts = [offered(sender, 0, None, [box]) for sender, box in zip(policy.each, boxes, strict=True)]
    places = {str(rank): torch.zeros_like(each) for rank, each in enumerate(tensors)}
    LiveWeights.join(parts).pour(places, lambda: None)
    assert all(torch.equal(place, tensor) for place, tensor in zip(places.values(), tensors, strict=True))
    assert sizes[1:9] == [8, 8] * 4  # a bucket of two numbers, and right after it its fingerprint
    assert sizes[-1] == 8 * (len(sizes) - 9)


def test_readers_that_ask_for_themselves_at_once_all_get_the_weights(policy: Senders) -> None:
    weights, known = publish(policy, 0)
    places = [torch.zeros_like(known) for _ in range(3)]

    def read(place: torch.Tensor) -> None:
        Reader().read(weights.offer, 1, _InPlace({"all": place}, lambda: None), lambda attempt, error: None)

    threads = [threading.Thread(target=read, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(place, known) for place in places)


def test_readers_in_the_hosts_memory_get_the_weights_of_a_policy_on_gpus(policy: Senders) -> None:
    for sender in policy.each:  # their parameters are here all the same: no test has a GPU
        sender._device = torch.device("cuda")
        sender._policy[:] = [where._replace(gpu="one") for where in sender._policy]
    weights, known = publish(policy, 0)
    place = torch.zeros_like(known)
    weights.pour({"all": place}, lambda: None)
    assert torch.equal(place, known)


@by_gloo
def test_groups_that_a_reader_has_not_any_more_are_made_under_another_name(
    policy: Senders, groups: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(2):
        weights, known = publish(policy, version)
        monkeypatch.setattr(live_weights._reader, "_groups", Groups())  # other policies' have taken their place
        place = torch.zeros_like(known)
        weights.pour({"all": place}, lambda: None)
        assert torch.equal(place, known)
    assert len(set(groups)) * 2 == len(groups) == 2 * 2 * len(policy.each)


@pytest.mark.parametrize("experts", [0, 4])
def test_an_engine_loads_the_tensors_of_a_layer_when_all_have_come_as_they_are_in_files(
    policy: Senders, tmp_path: Path, experts: int
) -> None:
    shape: dict[str, Any] = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(**shape, **heads, num_local_experts=experts) if experts else LlamaConfig(**shape, **heads)
    config.save_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_config(config)
    known, naming = dict(network.named_parameters()), Naming(str(tmp_path))
    loaded: list[dict[str, torch.Tensor]] = []

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        loaded.append(dict(tensors))

    offer = policy.offer(known, 0).offer
    outcome = read(offer, 1, naming, torch.device("cpu"), loaded.clear, load)
    assert outcome.begun
    assert outcome.way in ("by gloo", "through shared memory")
    came = {name: tensor for each in loaded for name, tensor in each.items()}
    assert {name: list(each.shape) for name, each in came.items()} == naming.filed()
    for name, tensor in naming.in_files(known.items()):
        assert torch.equal(came[name], tensor)
    layers = [each for each in loaded if any(".layers." in name for name in each)]
    assert len(layers) == 2
    policy.end()
    gone = read(offer, 1, naming, torch.device("cpu"), loaded.clear, load)
    assert (gone.way, gone.begun, gone.lost) == ("", False, "the policy's ranks")


class Dying:
    """A reader's connection to the store: the reader is killed before the second thing that it does there."""

    def __init__(self, store: Store) -> None:
        self._store, self._did = store, list[str]()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def do(*said: object) -> object:
            if self._did:
                raise KeyboardInterrupt
            self._did.append(name)
            return getattr(self._store, name)(*said)

        return do


def test_a_reader_that_dies_while_it_asks_does_not_keep_the_policy_from_its_next_update(
    policy: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(policy, 0)
    line, said = Line(policy.each[0].place), json.dumps(Asked("reader/0", 2, [], Where.of(torch.device("cpu"))))
    line.store = cast("Store", Dying(line.store))
    with suppress(KeyboardInterrupt):
        line.ask("names/1", said)
    for module in (broadcast, collective):
        monkeypatch.setattr(module, "STUCK", timedelta(seconds=1))  # the sender waits for it, because it has asked
    ending = threading.Thread(target=policy.end, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()


async def test_what_is_restored_ends_the_sending_in_its_turn() -> None:
    did = list[str]()
    state = SimpleNamespace(read=lambda _: did.append("read"))
    trainable = SimpleNamespace(turn=asyncio.Lock(), passes=SimpleNamespace(model=None), state=state)
    policy = TrainedPolicy(PolicyConfig(model="m"), cast("Trainable", trainable))
    policy._sender = cast("Sender", SimpleNamespace(end=lambda: did.append("end")))
    async with trainable.turn:  # `weights` may offer what is there before
        restored = asyncio.create_task(policy.restore("folder"))
        await asyncio.sleep(0)
        assert did == []
    await restored
    assert did == ["end", "read"]
