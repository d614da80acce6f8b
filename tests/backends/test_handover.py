"""Whose memory readers of a broadcast open, and how buckets are handed over. tests/gpu asks the same of GPUs."""

import os
import secrets
import signal
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshrl_hf.handover import Desk, Handing, Slots, Taking, Unopened, desk_of, open_slots
from meshrl_hf.reach import Where, on_gpus, routes

CPU = torch.device("cpu")
LONG = 600.0
"""Seconds that nothing takes."""
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


def test_buckets_are_on_gpus_if_no_group_has_two_members_on_one() -> None:
    for policy, readers, together in (
        (HERE, HERE, True),  # each on the GPU of a rank, which receives the other's buckets for it
        (HERE, [THERE], True),
        (HERE, [THERE, HERE[0]], True),
        (HERE, [THERE, THERE], False),  # two members of each group on one GPU
        (HERE, [HERE[0]._replace(machine="")], False),  # on a rank's GPU, and it may not open its memory
        (HERE, [Where("here")], False),
        ([Where("here")], HERE, False),
        ([HERE[0], HERE[0]], HERE[:1], True),  # no group is needed
        ([HERE[0], HERE[0]], [THERE], False),
    ):
        assert on_gpus(policy, readers) == together, (policy, readers)


class Ranks:
    """Desks of a policy's ranks in this process, each of which admits in a thread."""

    def __init__(self) -> None:
        self.names = secrets.token_hex(8)
        self._threads = ThreadPoolExecutor()

    def admit(self, *tokens: str, rank: int = 0, seconds: float = LONG) -> "Future[Handing]":
        """Make a rank's desk, and admit readers to three slots, whose bytes are 10, 11 and 12."""
        slots = Slots(3, 64, CPU, shared=True)
        slots.tensor.copy_(torch.arange(10, 13, dtype=torch.uint8)[:, None])
        desk = Desk(desk_of(self.names, rank))
        return self._threads.submit(desk.admit, "key", tokens, slots, seconds)

    def taking(self, token: str) -> Taking:
        """A reader at the first rank's desk."""
        made = Taking(desk_of(self.names, 0), "key", token, CPU, LONG)
        made.open()
        return made


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_buckets_that_come_before_their_turn_are_kept_and_freed_by_slot(ranks: Ranks) -> None:
    admitted = ranks.admit("a")
    with ranks.taking("a") as reader, admitted.result() as handing:
        for slot, (rank, number) in enumerate([(1, 0), (0, 0), (1, 1)]):
            handing.give(["a"], rank, number, slot)
        assert reader.bucket(0, 0, 5).tolist() == [11] * 5
        reader.done()
        handing.wait(["a"], 1)
        assert reader.bucket(1, 0, 64).tolist() == [10] * 64
        assert reader.bucket(1, 1, 1).tolist() == [12]
        reader.done()
        handing.wait(["a"], 2)


def test_strangers_and_readers_of_earlier_passes_are_sent_away(ranks: Ranks) -> None:
    admitted = ranks.admit("a")
    said = [b"", b"\0", b"\5\0\0\0junk!", b"\2\0\0\0{}"]
    said += [len(each).to_bytes(4, "little") + each for each in (b'["key", "b"]', b'["old", "a"]', b'["key"]')]
    for each in said:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{desk_of(ranks.names, 0)}")
            stranger.sendall(each)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    with ranks.taking("a") as reader, admitted.result() as handing:
        handing.give(["a"], 0, 0, 2)
        assert reader.bucket(0, 0, 1).tolist() == [12]


def test_another_users_processes_are_sent_away(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 123456)
    admitted = ranks.admit("a", seconds=0.2)
    with pytest.raises(ConnectionError, match="belongs to another user"):
        ranks.taking("a")
    with pytest.raises(TimeoutError):
        admitted.result()


def test_each_side_sees_that_the_other_is_gone(ranks: Ranks) -> None:
    admitted = ranks.admit("a", "b")
    with ranks.taking("a") as reader:
        with ranks.taking("b"):
            handing = admitted.result()
            handing.give(["a", "b"], 0, 0, 0)
        with handing, pytest.raises(ConnectionError, match="a reader has ended its part"):
            handing.wait(["b"], 0)
        reader.bucket(0, 0, 64)
        with pytest.raises(ConnectionError, match="a rank of the policy has ended its part"):
            reader.bucket(0, 1, 64)


def test_a_process_that_is_forked_meanwhile_keeps_nobody_waiting(ranks: Ranks) -> None:
    admitted = ranks.admit("a")
    with ranks.taking("a") as reader:
        handing = admitted.result()
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


def test_a_failing_reader_goes_to_all_desks_so_that_none_waits_for_it(ranks: Ranks) -> None:
    waiting = [ranks.admit("a", rank=rank) for rank in (0, 2)]
    with ExitStack() as stack, pytest.raises(Unopened, match=r"cannot be opened: .* refused"):
        open_slots(stack, ranks.names, range(3), "key", "a", CPU, LONG)

    def use(admitted: "Future[Handing]") -> None:
        with admitted.result() as handing:
            handing.give(["a"], 0, 0, 0)
            handing.wait(["a"], 0)

    for each in waiting:
        with pytest.raises(ConnectionError):
            use(each)
