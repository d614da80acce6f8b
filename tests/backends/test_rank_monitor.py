import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, cycle
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from meshrl.errors import ConfigError
from meshrl.mesh import Rank
from meshrl_torch.ranks import process_group as group
from meshrl_torch.ranks.rank_monitor import RankMonitor
from meshrl_torch.wire import nccl

Losses: TypeAlias = "Queue[tuple[int, int]]"
"""The rank that hears of a loss, and the lost rank."""
Watching: TypeAlias = Callable[..., list[RankMonitor]]


def _hear(losses: Losses, own: int, gone: int, silent: bool) -> None:
    assert not silent
    losses.put((own, gone))


@pytest.fixture
def losses() -> Losses:
    return Queue()


@pytest.fixture
def watching(losses: Losses) -> Iterator[Watching]:
    made: list[RankMonitor] = []

    def make(store: Any, size: int, *ranks: int, **limits: float) -> list[RankMonitor]:
        for index in ranks:
            hear = partial(_hear, losses, index)
            made.append(RankMonitor(store, Rank(index, size), "127.0.0.1", hear, **{"patience": 10, **limits}))
        return made

    yield make
    for each in made:
        each.close()


def new_store() -> Any:
    return vars(dist)["HashStore"]()


@pytest.mark.process
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_hear_of_a_killed_rank(victim: int, watching: Watching, losses: Losses, tmp_path: Path) -> None:
    store, (reading, writing) = vars(dist)["FileStore"](str(tmp_path / "store"), 3), os.pipe()
    process = os.fork()
    if not process:
        try:
            RankMonitor(store, Rank(victim, 3), "127.0.0.1", lambda *_: None, 10)
            os.write(writing, b"ready")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        watching(store, 3, *({0, 1, 2} - {victim}), connected=600)
        assert os.read(reading, 5) == b"ready"
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reading)
    assert {losses.get() for _ in range(2)} == {(each, victim) for each in range(3) if each != victim}


def test_a_rank_that_dies_before_it_or_others_have_connected_is_heard_of(watching: Watching, losses: Losses) -> None:
    watching(new_store(), 3, 0, 1, connected=0.5)
    assert {losses.get() for _ in range(2)} == {(0, 2), (1, 2)}
    *_, dies = watching(new_store(), 4, 0, 1, 2)
    dies._own.shutdown(socket.SHUT_RDWR)
    assert (0, 2) in {losses.get() for _ in range(3)}


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_closed_monitor_counts_as_no_loss_and_reports_none(leaves: int, watching: Watching, losses: Losses) -> None:
    monitors = watching(new_store(), 3, 0, 1, 2, patience=(0.1, 1e9)[leaves])  # the system takes any patience
    monitors[leaves].close()
    if leaves:  # the others are watched still
        monitors[2]._own.shutdown(socket.SHUT_RDWR)
        assert (0, 2) in {losses.get() for _ in range(2)}
    for each in monitors:
        each.close()
    assert losses.empty()


def test_collectives_of_gpus_are_aborted_but_not_those_of_a_later_group(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: aborted.append("all"))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=(world := object())))
    group._end_collectives(torch.device("cpu"), world, 1, silent=False)  # type: ignore[arg-type]
    group._end_collectives(torch.device("cuda"), object(), 1, silent=False)  # type: ignore[arg-type]
    assert aborted == []
    group._end_collectives(torch.device("cuda"), world, 1, silent=False)  # type: ignore[arg-type]
    assert aborted == ["all"]


def test_a_mesh_with_gpus_does_not_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    complaint = r"gpus = 1, but torch .* finds no GPU: its wheel is for .*, no driver .* CUDA_VISIBLE_DEVICES is '0'"
    with pytest.raises(ConfigError, match=complaint):
        group.join(Rank(gpus=1), torch.device("cpu"), "fsdp")


@pytest.mark.parametrize(
    ("gpus", "kind", "complaint"),
    [
        (0, "cpu", "rank 0 computes on cuda with NCCL 2.0 and rank 1 on cpu"),
        (1, "cpu", "rank 1: the mesh has gpus = 1"),
        (1, "cuda", "cuda with NCCL 2.1"),
        (0.5, "cuda", "the ranks 0 and 1 share the GPU GPU-7, and NCCL takes one rank on each"),
    ],
)
def test_all_ranks_are_told_of_one_that_cannot_join_before_they_wait(
    gpus: float, kind: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = cycle((0,)) if gpus == 0.5 else count()
    monkeypatch.setattr(nccl, "release", lambda: f"2.{next(releases)}")
    monkeypatch.setattr(group, "gpu_of", lambda _: "GPU-7")
    store = new_store()
    monkeypatch.setattr(group, "mesh_store", lambda rank: store)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with ThreadPoolExecutor(2) as pool:
        joining = [
            pool.submit(group.join, Rank(index, 2, gpus=gpus), torch.device(kind), "fsdp")
            for index, kind in enumerate(("cuda", kind))
        ]
    for each in joining:
        assert isinstance(each.exception(), ConfigError)
        assert complaint in str(each.exception())
