import json
import os
import re
import secrets
import signal
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config

from meshrl import PolicyConfig
from meshrl.errors import ConfigError, ModelError
from meshrl_inference.engine_side.loading import Naming, read_broadcast
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.weights import live_weights
from meshrl_torch.weights import sender as broadcast
from meshrl_torch.weights.live_weights import LiveWeights, offer_weights
from meshrl_torch.wire import collective, fp8
from meshrl_torch.wire.bucket_bytes import fingerprint
from meshrl_torch.wire.bucket_server import (
    BucketClient,
    BucketServer,
    OpenError,
    ReaderConnections,
    Slots,
    open_slots,
    server_name,
)
from meshrl_torch.wire.collective import IN_FLIGHT, KEPT
from meshrl_torch.wire.manifest import FP8, SCALE
from meshrl_torch.wire.plan import Locality, ReadRequest, StoreConnection, on_gpus, routes
from meshrl_torch.wire.reader import Reader
from tests.backends.material import GPT2, SHAPE, ModelOf
from tests.senders import Senders, sending

LIMIT = 1 << 10
GLOO, MEMORY = "by gloo", "through shared memory"


def received(reader: Reader, weights: LiveWeights, places: Mapping[str, Tensor]) -> str:
    failed: list[str] = []
    model = live_weights.InPlace(places, lambda: None)
    way = reader.read(weights.manifest, 1, model, lambda _, error: failed.append(error))
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
                sender._policy[1:] = [Locality("elsewhere")] * KEPT
        yield made


def tensors(version: int, ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(version)
    shapes = {
        "many": (7 * ranks, LIMIT // 4), "nearly a bucket": (ranks, LIMIT // 4 // 6), "few": (2, 5), "number": (1,),
        "odd": (999, 5), "experts": (6, 3, 70),
    }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_weights_come_whole_to_readers_in_turn_and_at_once_into_tensors_of_any_strides(policy: Senders) -> None:
    readers = [Reader() for _ in range(KEPT + 1)]  # as processes of their own would have: more than are kept
    ways: set[str] = set()
    versions = [tensors(version, len(policy.each)) for version in range(2)]
    for version, known in enumerate(versions):
        weights = policy.offer(known, version)
        sizes = [layout.nbytes for each in weights.manifest.sources for layout in each.layouts]
        assert max(sizes) <= 2 * LIMIT // IN_FLIGHT
        for number, reader in enumerate([*readers, Reader()]):
            places = {name: torch.zeros_like(each) for name, each in known.items()}
            if number % 2:
                places["nearly a bucket"] = torch.zeros(known["nearly a bucket"].shape[::-1]).T
            ways.add(received(reader, weights, places))
            for name, place in places.items():
                assert torch.equal(place, known[name]), name
    own = [{name: torch.zeros_like(each) for name, each in versions[-1].items()} for _ in range(3)]
    weights = policy.offer(versions[-1], len(versions))
    with ThreadPoolExecutor() as at_once:
        ways.update(at_once.map(lambda places: received(Reader(), weights, places), own))
    assert all(torch.equal(place, versions[-1][name]) for each in own for name, place in each.items())
    assert ways <= {GLOO, MEMORY}


def test_ranks_with_more_buckets_than_others_keep_nobody_waiting_and_round_to_their_dtype(policy: Senders) -> None:
    parts = [torch.randn(3000), *(torch.randn(2, dtype=torch.bfloat16) for _ in policy.each[1:])]
    boxes = [Box(str(rank), tuple(each.shape), (0,), each) for rank, each in enumerate(parts)]
    offers = [offer_weights(sender, 0, None, [box]) for sender, box in zip(policy.each, boxes, strict=True)]
    places = {str(rank): torch.zeros(each.shape) for rank, each in enumerate(parts)}
    LiveWeights.join(offers).load_into(places, lambda: None)
    assert all(torch.equal(place, part.float()) for place, part in zip(places.values(), parts, strict=True))


def test_damaged_tensors_are_named_and_others_arrive(policy: Senders, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: torch.randn(2 * len(policy.each), LIMIT // 4) for name in ("first", "third")}
    known = {"first": known["first"], "second": torch.full_like(known["first"], 7.0), "third": known["third"]}
    places = {name: torch.zeros_like(each) for name, each in known.items()}

    def of_others(content: Tensor) -> Tensor:
        """What a sender tells, as if the reader had got a bit of `second` otherwise."""
        return fingerprint(content) ^ int((content.view(torch.float32) == 7.0).any())

    with monkeypatch.context() as patch:
        patch.setattr(broadcast, "fingerprint", of_others)
        with pytest.raises(ModelError, match=r"version 0 did not .* sent: tensors in damaged buckets: 1 \(second\)"):
            policy.offer(known, 0).load_into(places, lambda: None)
    policy.offer(known, 1).load_into(places, lambda: None)
    assert all(torch.equal(place, known[name]) for name, place in places.items())


@pytest.mark.parametrize("experts", [0, 4])
def test_an_engine_loads_whole_layers_as_they_are_in_files(policy: Senders, tmp_path: Path, experts: int) -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=experts) if experts else LlamaConfig(**SHAPE)
    config.save_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_config(config)
    known, naming = dict(network.named_parameters()), Naming(str(tmp_path))
    loaded: list[dict[str, Tensor]] = []

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        loaded.append(dict(tensors))

    offer = policy.offer(known, 0).manifest
    outcome = read_broadcast(offer, 1, naming, torch.device("cpu"), loaded.clear, load)
    assert (outcome.begun, outcome.transport in (GLOO, MEMORY)) == (True, True)
    came = {name: tensor for each in loaded for name, tensor in each.items()}
    assert {name: list(each.shape) for name, each in came.items()} == naming.file_shapes()
    for name, tensor in naming.in_files(known.items()):
        assert torch.equal(came[name], tensor)
    layers = [each for each in loaded if any(".layers." in name for name in each)]
    assert len(layers) == 2
    policy.end()
    gone = read_broadcast(offer, 1, naming, torch.device("cpu"), loaded.clear, load)
    assert (gone.transport, gone.begun, gone.lost) == ("", False, "the policy's ranks")


class Dying:
    """A reader's connection to the store: the reader is killed before the second thing that it does there."""

    def __init__(self, store: Any) -> None:
        self._store, self._did = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        if self._did:
            raise KeyboardInterrupt
        self._did.append(name)
        return getattr(self._store, name)


def test_a_reader_that_dies_while_it_asks_does_not_hold_up_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    with sending(KEPT + 1, LIMIT) as policy:
        policy.offer(tensors(0, len(policy.each)), 0)
        connection = StoreConnection(policy.each[0].address)
        request = json.dumps(ReadRequest("reader/0", 2, [], Locality.of(torch.device("cpu"))))
        connection.store = cast("Any", Dying(connection.store))
        with suppress(KeyboardInterrupt):
            connection.push_request("names/1", request)
        for module in (broadcast, collective):
            monkeypatch.setattr(module, "STUCK", timedelta(seconds=1))  # the sender waits for it, because it has asked
        policy.end()


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32), st.sampled_from([1e-40, 1e-3, 1.0, 1e20]))
def test_in_fp8_numbers_are_near_and_the_largest_stay_so(rows: int, columns: int, seed: int, size: float) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    numbers, scales = fp8.quantized(matrix)
    assert (numbers.dtype, scales.shape) == (getattr(torch, FP8), (rows, 1))
    back = numbers.double() * scales.double()
    # Half of the last of 3 bits, or of the smallest number.
    assert ((back - matrix).abs() <= (matrix.double().abs() * 2**-4).maximum(scales.double() * 2**-9)).all()
    if size >= 1e-3:
        assert numbers.float().abs().amax(1).tolist() == [448] * rows


def test_rows_of_zeros_stay_zeros_and_scales_are_float32_whatever_the_default_is() -> None:
    numbers, scales = fp8.quantized(torch.tensor([[0.0, 0.0], [1.0, torch.nan]]))
    assert (numbers[0].float() == 0).all()
    assert (scales[0] > 0).all()
    assert (numbers[1].float() * scales[1]).isnan().any()
    matrix = torch.randn(3, 5)
    known = fp8.quantized(matrix)[1]
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads a model
    try:
        assert torch.equal(fp8.quantized(matrix)[1], known)
    finally:
        torch.set_default_dtype(torch.float32)


def test_matrices_in_fp8_are_linear_layers_without_the_head_and_other_models_are_refused(model_of: ModelOf) -> None:
    network = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE, tie_word_embeddings=False))
    found = fp8.matrices(network)
    assert ("lm_head.weight" in dict(network.named_parameters()), len(found)) == (True, 2 * 7)
    assert all(".layers." in name and name.endswith("proj.weight") for name in found)
    for tied in (True, False):
        network = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
        assert fp8.refusal(network) == ""
    mixture = AutoModelForCausalLM.from_config(MixtralConfig(**SHAPE, num_local_experts=4))
    assert "such as model.layers.0.mlp" in fp8.refusal(mixture)
    config = PolicyConfig(model=model_of(GPT2Config(**GPT2)), weight_sync="broadcast", weight_sync_dtype="fp8")
    with pytest.raises(ConfigError, match=r"FP8: 8 of its tensors .*, such as transformer\.h\.0\..*Remove"):
        FsdpPolicy(config)


def test_an_engine_gets_matrices_in_fp8_with_their_layers_and_others_refuse_them(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE)
    config.save_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_config(config)
    known, naming = dict(network.named_parameters()), Naming(str(tmp_path))
    came: dict[str, Tensor] = {}
    with sending(3, 1 << 14, naming.matrices) as policy:
        weights = policy.offer(known, 1)
        size = sum(each.numel() * (1 if name in naming.matrices else 4) for name, each in known.items())
        scales = sum(len(known[name]) * 4 for name in naming.matrices)
        assert weights.nbytes == size + scales
        outcome = read_broadcast(weights.manifest, 1, naming, torch.device("cpu"), came.clear, came.update)
        assert outcome.transport
        for refused in (lambda: weights.load_into(known, lambda: None), lambda: weights.tensors):
            with pytest.raises(ModelError, match=r"version 1 come in FP8, .* Remove policy.weight_sync_dtype"):
                refused()
    assert came.keys() == known.keys() | {name + SCALE for name in naming.matrices}
    assert {name for name, tensor in came.items() if tensor.dtype == getattr(torch, FP8)} == {*naming.matrices}
    assert all(torch.equal(came[name], tensor) for name, tensor in known.items() if name not in naming.matrices)


CPU = torch.device("cpu")
LONG = 600.0
places = st.builds(
    lambda machine, gpu, seen: Locality(machine, machine + gpu, [machine + each for each in {gpu, *seen}]),
    st.sampled_from(["", "host1", "host2"]),
    st.sampled_from("abc"),
    st.lists(st.sampled_from("abc")),
)


@given(st.lists(places, min_size=1, max_size=4), st.lists(places, min_size=1, max_size=4), st.booleans())
def test_readers_get_buckets_of_memory_they_open(policy: list[Locality], readers: list[Locality], gpus: bool) -> None:
    for reader, route in zip(readers, routes(policy, readers, gpus), strict=True):
        near = [rank for rank, each in enumerate(policy) if reader.opens(each, gpus)]
        assert len(route) == (len(policy) if near else 0)
        assert set(route) <= set(near)
        if own := {rank for rank in near if gpus and policy[rank].gpu == reader.gpu}:
            assert set(route) == own
        else:
            assert all(route[rank] == rank for rank in near)
            assert len({by for rank, by in enumerate(route) if rank not in near}) <= 1


HERE, THERE = [Locality("here", f"gpu{each}", [f"gpu{each}"]) for each in range(2)], Locality("there", "gpu9", ["gpu9"])


def test_buckets_are_on_gpus_if_no_group_has_two_members_on_one() -> None:
    for policy, readers, together in (
        (HERE, HERE, True),  # each on the GPU of a rank, which receives the other's buckets for it
        (HERE, [THERE], True),
        (HERE, [THERE, HERE[0]], True),
        (HERE, [THERE, THERE], False),  # two members of each group on one GPU
        (HERE, [HERE[0]._replace(machine="")], False),  # on a rank's GPU, and it may not open its memory
        (HERE, [Locality("here")], False),
        ([Locality("here")], HERE, False),
        ([HERE[0], HERE[0]], HERE[:1], True),  # no group is needed
        ([HERE[0], HERE[0]], [THERE], False),
        (HERE, [HERE[0]._replace(nccl="2.29.7")], True),  # of another release
    ):
        assert on_gpus(policy, readers) == together, (policy, readers)


def test_readers_with_another_release_of_nccl_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with sending(1, LIMIT) as policy:
        policy.each[0]._policy[:] = [HERE[0]._replace(nccl="2.29.7")]
        weights = policy.offer(tensors(0, 1), 0)
        with monkeypatch.context() as patch:
            patch.setattr(Locality, "of", lambda _: THERE._replace(nccl="2.27.3"))
            complaint = r"policy's torch has NCCL 2.29.7 and a reader's has 2.27.3, .* one release of torch"
            with pytest.raises(ConfigError, match=complaint):
                weights.tensors  # noqa: B018 -- they come when they are looked at
            outcome = read_broadcast(weights.manifest, 1, cast("Any", None), CPU, lambda: None, lambda _: None)
            assert re.search(complaint, outcome.reason)
        assert weights.tensors.keys() == tensors(0, 1).keys()  # the others still get them


class Ranks(NamedTuple):
    names: str
    threads: ThreadPoolExecutor

    def admit(self, *tokens: str, rank: int = 0, seconds: float = LONG) -> "Future[ReaderConnections]":
        """Make a rank's server, and admit readers to three slots, whose bytes are 10, 11 and 12."""
        slots = Slots(3, 64, CPU, shared=True)
        slots.tensor.copy_(torch.arange(10, 13, dtype=torch.uint8)[:, None])
        server = BucketServer(server_name(self.names, rank))
        return self.threads.submit(server.admit, "key", tokens, slots, seconds)

    def client(self, token: str) -> BucketClient:
        made = BucketClient(server_name(self.names, 0), "key", token, CPU, LONG)
        made.open()
        return made


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(secrets.token_hex(8), ThreadPoolExecutor())


def test_strangers_and_readers_of_earlier_passes_are_sent_away(ranks: Ranks) -> None:
    admitted = ranks.admit("a")
    said = [b"", b"\0", b"\5\0\0\0junk!", b"\2\0\0\0{}"]
    said += [len(each).to_bytes(4, "little") + each for each in (b'["key", "b"]', b'["old", "a"]', b'["key"]')]
    for each in said:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{server_name(ranks.names, 0)}")
            stranger.sendall(each)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    with ranks.client("a") as reader, admitted.result() as connections:
        connections.give(["a"], 0, 0, 2)
        assert reader.bucket(0, 0, 1).tolist() == [12]


def test_another_users_processes_are_sent_away(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 123456)
    admitted = ranks.admit("a", seconds=0.2)
    with pytest.raises(ConnectionError, match="belongs to another user"):
        ranks.client("a")
    with pytest.raises(TimeoutError):
        admitted.result()


def test_a_process_that_is_forked_meanwhile_keeps_nobody_waiting(ranks: Ranks) -> None:
    admitted = ranks.admit("a")
    with ranks.client("a") as reader:
        connections = admitted.result()
        child = os.fork()
        if not child:
            signal.pause()
        try:
            with connections:  # the rank ends its part
                pass
            with pytest.raises(ConnectionError, match="a rank of the policy has ended its part"):
                reader.bucket(0, 0, 64)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_failing_reader_goes_to_all_desks_so_that_none_waits_for_it(ranks: Ranks) -> None:
    waiting = [ranks.admit("a", rank=rank) for rank in (0, 2)]
    with ExitStack() as stack, pytest.raises(OpenError, match=r"cannot be opened: .* refused"):
        open_slots(stack, ranks.names, range(3), "key", "a", CPU, LONG)

    def use(admitted: "Future[ReaderConnections]") -> None:
        with admitted.result() as connections:
            connections.give(["a"], 0, 0, 0)
            connections.wait(["a"], 0)

    for each in waiting:
        with pytest.raises(ConnectionError):
            use(each)
