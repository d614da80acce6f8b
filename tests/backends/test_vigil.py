"""A rank that dies is heard of by the others at once, whatever they wait for."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist

from meshrl.mesh import Rank
from meshrl_hf import group, vigil
from meshrl_hf.vigil import Vigil

RANK = """
import os, sys, threading
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from meshrl.mesh import Rank
from meshrl_hf.vigil import Vigil

index, size, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, size, is_master=index == 0)
dist.init_process_group("gloo", store=PrefixStore("group", store), rank=index, world_size=size)

def lost(gone, silent):
    print("silent" if silent else "died", gone, flush=True)
    os._exit(0)

Vigil(store, Rank(index, size), "127.0.0.1", lost, 10)
dist.barrier()
print("ready", flush=True)
try:
    dist.recv(torch.zeros(1), src=(index + 1) % size if index != 1 else 0)  # which nobody sends
except RuntimeError:  # gloo's connection to a dead rank is closed
    threading.Event().wait(60)
"""


def start(size: int) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(index), str(size), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index in range(size)
    ]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_hear_of_a_rank_that_is_killed_while_they_wait_for_living_ones(victim: int) -> None:
    ranks = start(3)
    try:
        for each in ranks:
            assert each.stdout
            assert each.stdout.readline() == "ready\n"
        ranks[victim].send_signal(signal.SIGKILL)
        for index, each in enumerate(ranks):
            said = each.communicate(timeout=60)[0]
            assert said == ("" if index == victim else f"died {victim}\n")
    finally:
        for each in ranks:
            each.kill()
            each.wait()


Told: TypeAlias = "Queue[tuple[int, int]]"
"""Who is told, and of whom."""
Watching: TypeAlias = Callable[..., tuple[list[Vigil], Told]]


def _hear(told: Told, own: int, gone: int, silent: bool) -> None:
    assert not silent
    told.put((own, gone))


@pytest.fixture
def watching() -> Iterator[Watching]:
    """`watching(size, *ranks)`: the vigils of some ranks, in this process."""
    made: list[Vigil] = []

    def make(size: int, *ranks: int, connected: float = 60) -> tuple[list[Vigil], Told]:
        store, told = vars(dist)["HashStore"](), Queue[tuple[int, int]]()
        for index in ranks:
            hear = partial(_hear, told, index)
            made.append(Vigil(store, Rank(index, size), "127.0.0.1", hear, 10, connected))
        return made, told

    yield make
    for each in made:
        each.close()
    assert not [each for each in threading.enumerate() if each.name == "vigil"]


def test_a_rank_that_dies_before_it_has_connected_is_heard_of(watching: Watching) -> None:
    _, told = watching(3, 0, 1, connected=0.5)
    assert {told.get(timeout=60) for _ in range(2)} == {(0, 2), (1, 2)}


def test_a_rank_that_dies_is_heard_of_before_all_have_connected(watching: Watching) -> None:
    (_, _, dies), told = watching(4, 0, 1, 2)
    dies._own.shutdown(socket.SHUT_RDWR)
    assert (0, 2) in {told.get(timeout=60) for _ in range(3)}


@pytest.mark.parametrize("patience", [0.1, 1e9])
def test_any_patience_is_one_that_the_system_takes(patience: float) -> None:
    with socket.socket() as connection:
        vigil._kept(connection, patience)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("leaves", [0, 1])
def test_who_closes_its_vigil_is_not_dead_and_hears_no_more(leaves: int, watching: Watching) -> None:
    vigils, told = watching(3, 0, 1, 2)
    vigils[leaves].close()
    if leaves:  # the others are watched still
        vigils[2]._own.shutdown(socket.SHUT_RDWR)
        assert (0, 2) in {told.get(timeout=60) for _ in range(2)}
    for each in vigils:
        each.close()
    assert told.empty()


def test_collectives_of_gpus_are_aborted_and_those_of_a_group_that_came_after_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append("all"))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=(world := object())))
    group._end_collectives(torch.device("cpu"), world, 1, silent=False)  # type: ignore[arg-type]
    group._end_collectives(torch.device("cuda"), object(), 1, silent=False)  # type: ignore[arg-type]
    assert aborted == []
    group._end_collectives(torch.device("cuda"), world, 1, silent=False)  # type: ignore[arg-type]
    assert aborted == ["all"]
