"""Whose memory readers of a broadcast open, and how buckets are handed over."""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from meshrl_hf import handover
from meshrl_hf.handover import Desk, Handing, Slots, Taking, Unopened, desk_of, open_slots
from meshrl_hf.reach import Where, on_gpus, routes

CPU = torch.device("cpu")
places = st.builds(
    lambda machine, gpu, seen: Where(machine, machine + gpu, [machine + each for each in {gpu, *seen}]),
    st.sampled_from(["", "host1", "host2"]),
    st.sampled_from("abc"),
    st.lists(st.sampled_from("abc")),
)


@given(st.lists(places, min_size=1, max_size=4), st.lists(places, min_size=1, max_size=4), st.booleans())
def test_readers_get_buckets_only_by_ranks_whose_memory_they_open(
    policy: list[Where], readers: list[Where], gpus: bool
) -> None:
    for reader, route in zip(readers, routes(policy, readers, gpus), strict=True):
        near = [rank for rank, each in enumerate(policy) if reader.opens(each, gpus)]
        assert len(route) == (len(policy) if near else 0)
        assert set(route) <= set(near)
        own = [rank for rank in near if policy[rank].gpu == reader.gpu]
        if gpus and own:
            assert set(route) == set(own)
        else:
            assert all(route[rank] == rank for rank in near)
            assert len({by for rank, by in enumerate(route) if rank not in near}) <= 1


HERE, THERE = [Where("here", f"gpu{each}", [f"gpu{each}"]) for each in range(2)], Where("there", "gpu9", ["gpu9"])


@pytest.mark.parametrize(
    ("policy", "readers", "together"),
    [
        (HERE, HERE, True),  # each on the GPU of a rank, which receives the other's buckets for it
        (HERE, [THERE], True),
        (HERE, [THERE, HERE[0]], True),
        (HERE, [THERE, THERE], False),  # two members of each group on one GPU
        (HERE, [HERE[0]._replace(machine="")], False),  # on a rank's GPU, and it may not open its memory
        (HERE, [Where("here")], False),
        ([Where("here")], HERE, False),
        ([HERE[0], HERE[0]], HERE[:1], True),  # no group is needed
        ([HERE[0], HERE[0]], [THERE], False),
    ],
)
def test_buckets_are_on_gpus_if_no_group_has_two_members_on_one(
    policy: list[Where], readers: list[Where], together: bool
) -> None:
    assert on_gpus(policy, readers) == together


class Forgetful(dict[str, Slots]):
    """Keeps nothing, as if ranks were other processes."""

    def __setitem__(self, name: str, slots: Slots) -> None:
        pass


@pytest.fixture
def desk(request: pytest.FixtureRequest) -> Desk:
    return Desk(f"test-{request.node.name}-{threading.get_native_id()}")


def name_of(desk: Desk) -> str:
    return str(desk._listening.getsockname()[1:].decode())


def taking(desk: Desk, token: str, *, opened: bool = True) -> Taking:
    """A reader at the desk."""
    made = Taking(name_of(desk), "key", token, CPU, 20)
    if opened:
        made.open()
    return made


def admitting(desk: Desk, slots: Slots, tokens: list[str], seconds: float = 20) -> Callable[[], Handing]:
    """Begin to admit. Returns what waits for the end."""
    told: list[Handing | OSError] = []

    def admit() -> None:
        try:
            told.append(desk.admit("key", tokens, slots, seconds))
        except OSError as error:
            told.append(error)

    thread = threading.Thread(target=admit)
    thread.start()

    def result() -> Handing:
        thread.join()
        if isinstance(told[0], OSError):
            raise told[0]
        return told[0]

    return result


def test_buckets_that_come_before_their_turn_are_kept_and_freed_by_slot(desk: Desk) -> None:
    slots = Slots(3, 64, CPU, shared=True)
    admitted = admitting(desk, slots, ["a"])
    with taking(desk, "a") as reader, admitted() as handing:
        for slot, (rank, number) in enumerate([(1, 0), (0, 0), (1, 1)]):
            slots.tensor[slot] = 10 * rank + number + 1
            handing.give(["a"], rank, number, slot)
        assert reader.bucket(0, 0, 5).tolist() == [1] * 5
        reader.done()
        handing.wait(["a"], 1)
        assert handing._open == {"a": {0, 2}}
        assert reader.bucket(1, 0, 64).tolist() == [11] * 64
        assert reader.bucket(1, 1, 1).tolist() == [12]
        reader.done()
        handing.wait(["a"], 2)
        assert handing._open == {"a": {0}}


def test_strangers_and_readers_of_earlier_passes_are_sent_away(desk: Desk) -> None:
    slots = Slots(1, 64, CPU, shared=True)
    admitted = admitting(desk, slots, ["a"])
    said = [b"", b"\0", b"\5\0\0\0junk!", b"\2\0\0\0{}"]
    said += [len(each).to_bytes(4, "little") + each for each in (b'["key", "b"]', b'["old", "a"]', b'["key"]')]
    for each in said:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(20)
            stranger.connect(f"\0{name_of(desk)}")
            stranger.sendall(each)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    with taking(desk, "a"), admitted() as handing:
        assert list(handing._readers) == ["a"]


def test_another_users_processes_are_sent_away(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(1, 64, CPU, shared=True)
    monkeypatch.setattr("os.getuid", lambda: 123456)
    admitted = admitting(desk, slots, ["a"], seconds=0.2)
    with pytest.raises(ConnectionError, match="belongs to another user"):
        taking(desk, "a")
    with pytest.raises(TimeoutError):
        admitted()


def test_each_side_sees_that_the_other_is_gone(desk: Desk) -> None:
    slots = Slots(1, 64, CPU, shared=True)
    admitted = admitting(desk, slots, ["a", "b"])
    with taking(desk, "a") as reader:
        with taking(desk, "b"):
            handing = admitted()
            handing.give(["a", "b"], 0, 0, 0)
        with handing, pytest.raises(ConnectionError, match="a reader has ended its part"):
            handing.wait(["b"], 0)
        reader.bucket(0, 0, 64)
        with pytest.raises(ConnectionError, match="a rank of the policy has ended its part"):
            reader.bucket(0, 1, 64)


def test_a_process_that_is_forked_meanwhile_keeps_nobody_waiting(desk: Desk) -> None:
    admitted = admitting(desk, Slots(1, 64, CPU, shared=True), ["a"])
    with taking(desk, "a") as reader:
        handing = admitted()
        child = os.fork()
        if not child:
            signal.pause()
        try:
            with handing:  # the rank ends its part
                pass
            with pytest.raises(ConnectionError, match="a rank of the policy has ended its part"):
                reader.bucket(0, 0, 64)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_failing_reader_goes_to_all_desks_so_that_none_waits_for_it(desk: Desk) -> None:
    names = secrets.token_hex(8)
    desks = {rank: Desk(desk_of(names, rank)) for rank in (0, 2)}
    waiting = [admitting(each, Slots(1, 64, CPU, shared=True), ["a"]) for each in desks.values()]
    with ExitStack() as stack, pytest.raises(Unopened, match=r"cannot be opened: .* refused"):
        open_slots(stack, names, range(3), "key", "a", CPU, 20)
    stack.close()

    def use(admitted: Callable[[], Handing]) -> None:
        with admitted() as handing:
            handing.give(["a"], 0, 0, 0)
            handing.wait(["a"], 0)

    for each in waiting:
        with pytest.raises(ConnectionError):
            use(each)


def test_memory_on_a_gpu_is_opened_by_the_handle_that_torch_makes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's two functions stand for themselves, with the arguments that they have."""
    slots, opened = Slots(2, 64, CPU, shared=False), dict[str, Any]()
    fields = {
        "storage_handle": b"\0\xff", "storage_size_bytes": 128, "storage_offset_bytes": 512, "ref_counter_handle": b"r",
        "ref_counter_offset": 3, "event_handle": b"", "event_sync_required": True,
    }  # fmt: skip

    def reduce(tensor: torch.Tensor) -> tuple[object, tuple[object, ...]]:
        start = (torch.Tensor, tensor.shape, tensor.stride(), 0, torch.TypedStorage, tensor.dtype, 7)
        storage = list(fields.values())
        return rebuild_cuda_tensor, (*start, *storage[:3], False, *storage[3:])

    @wraps(rebuild_cuda_tensor)
    def rebuild(**arguments: Any) -> torch.Tensor:
        opened.update(arguments)
        return slots.tensor

    monkeypatch.setattr(handover, "reduce_tensor", reduce)
    monkeypatch.setattr(handover, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(handover, "_here", Forgetful())
    monkeypatch.setattr(Where, "of", lambda _: Where("here", "gpu1", ["gpu0", "gpu1"]))
    admitted = admitting(desk, slots, ["a"])
    with taking(desk, "a") as reader, admitted() as handing:
        handing.give(["a"], 0, 0, 1)
        assert reader.bucket(0, 0, 64).data_ptr() == slots.tensor[1].data_ptr()
    assert {name: opened[name] for name in fields} == fields
    assert opened["storage_device"] == 1  # of the reader's own, which may have another number in the rank
    assert (opened["tensor_size"], opened["tensor_stride"], opened["dtype"]) == ((2, 64), (64, 1), torch.uint8)


def test_a_reader_in_the_ranks_own_process_needs_no_handle(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(1, 64, CPU, shared=False)
    monkeypatch.setattr(Slots, "form", {"count": 1, "nbytes": 64, "gpu": "gpu1", "handle": {}})
    admitted = admitting(desk, slots, ["a"])
    with taking(desk, "a") as reader, admitted() as handing:
        handing.give(["a"], 0, 0, 0)
        assert reader.bucket(0, 0, 64).data_ptr() == slots.tensor.data_ptr()
