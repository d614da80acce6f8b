"""A rank that dies is heard of by the others at once, whatever they wait for."""

import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from meshrl_hf import group

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

def died(dead):
    print("died", dead, flush=True)
    os._exit(0)

Vigil(store, Rank(index, size), "127.0.0.1", died)
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


def test_collectives_of_gpus_are_aborted_and_those_of_a_group_that_came_after_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append("all"))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=(world := object())))
    group._abort(torch.device("cpu"), world, 1)  # type: ignore[arg-type]
    group._abort(torch.device("cuda"), object(), 1)  # type: ignore[arg-type]
    assert aborted == []
    group._abort(torch.device("cuda"), world, 1)  # type: ignore[arg-type]
    assert aborted == ["all"]
