"""A rank that dies is heard of by the others at once, whatever they wait for."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from meshrl.mesh import Rank
from meshrl_hf import group
from meshrl_hf.vigil import Vigil

RANK = """
import sys, threading
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from meshrl.mesh import Rank
from meshrl_hf.vigil import Vigil

index, size, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
Vigil(PrefixStore(sys.argv[1], store), Rank(index, size), "127.0.0.1", lambda *_: None, 10)
print("ready", flush=True)
threading.Event().wait()
"""
Told: TypeAlias = "Queue[tuple[int, int]]"
"""Who is told, and of whom."""
Watching: TypeAlias = Callable[..., list[Vigil]]


def _hear(told: Told, own: int, gone: int, silent: bool) -> None:
    assert not silent
    told.put((own, gone))


@pytest.fixture
def told() -> Told:
    return Queue()


@pytest.fixture
def watching(told: Told) -> Iterator[Watching]:
    """`watching(store, size, *ranks)`: the vigils of some ranks, in this process."""
    made: list[Vigil] = []

    def make(store: Any, size: int, *ranks: int, **limits: float) -> list[Vigil]:
        for index in ranks:
            hear = partial(_hear, told, index)
            made.append(Vigil(store, Rank(index, size), "127.0.0.1", hear, **{"patience": 10, **limits}))
        return made

    yield make
    for each in made:
        each.close()


def new_store() -> Any:
    return vars(dist)["HashStore"]()


@pytest.mark.process
def test_the_others_hear_of_a_rank_that_is_killed(watching: Watching, told: Told) -> None:
    store = vars(dist)["TCPStore"](
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600)
    )
    victims: dict[int, subprocess.Popen[str]] = {}
    for victim in (0, 2):
        command = [sys.executable, "-c", RANK, str(victim), "3", str(store.port)]
        victims[victim] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        for victim, process in victims.items():
            watching(PrefixStore(str(victim), store), 3, *({0, 1, 2} - {victim}), connected=600)
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            process.kill()
            assert {told.get() for _ in range(2)} == {(each, victim) for each in range(3) if each != victim}
    finally:
        for process in victims.values():
            process.kill()
            process.communicate()


def test_a_rank_that_dies_before_it_has_connected_is_heard_of(watching: Watching, told: Told) -> None:
    watching(new_store(), 3, 0, 1, connected=0.5)
    assert {told.get() for _ in range(2)} == {(0, 2), (1, 2)}


def test_a_rank_that_dies_is_heard_of_before_all_have_connected(watching: Watching, told: Told) -> None:
    _, _, dies = watching(new_store(), 4, 0, 1, 2)
    dies._own.shutdown(socket.SHUT_RDWR)
    assert (0, 2) in {told.get() for _ in range(3)}


@pytest.mark.parametrize("leaves", [0, 1])
def test_who_closes_its_vigil_is_not_dead_and_hears_no_more(leaves: int, watching: Watching, told: Told) -> None:
    vigils = watching(new_store(), 3, 0, 1, 2, patience=(0.1, 1e9)[leaves])  # the system takes any patience
    vigils[leaves].close()
    if leaves:  # the others are watched still
        vigils[2]._own.shutdown(socket.SHUT_RDWR)
        assert (0, 2) in {told.get() for _ in range(2)}
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
