"""Rows through one process by bare shared memory: the limit if each rank returns its rows on its own.

Two processes copy their rows into memory that all have mapped and used before. Their caller joins each column there,
reads it, and copies new columns into it. The processes then read all, each one half of each column. There are no rows,
plans or checks. Measured by bench/roundtrip.py. As a script it is one of the processes: `python -m
bench.peers.shared_rows SOCKET MEMORY MIB RANK`.
"""

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.harness import ROOT
from bench.peers.payload import COLUMNS, agree, checksum, row_lengths, token_columns

RANKS: Final = 2
MAKE: Final = b"m"
READ: Final = b"r"
Columns: TypeAlias = dict[str, NDArray[np.generic]]


def columns_in(memory: mmap.mmap, counts: Sequence[int]) -> Iterator[Columns]:
    """Yield columns of so many tokens in memory, one after the other."""
    start = 0
    for count in counts:
        made: Columns = {}
        for name, dtype in COLUMNS.items():
            made[name] = np.frombuffer(memory, dtype, count, start)
            start += -(-made[name].nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        yield made


def counts_of(mib: int) -> list[int]:
    """Tokens of each rank's rows, of all, and of those that replace them."""
    counts = [int(lengths.sum()) for lengths in row_lengths(mib, RANKS)]
    return [*counts, sum(counts), sum(counts)]


def sums_of(columns: Columns, run: slice = slice(None)) -> NDArray[np.int64]:
    """A checksum of each column."""
    return np.array([checksum(columns[name][run]) for name in COLUMNS])


class SharedRows:
    """The caller, and its processes."""

    def __init__(self, mib: int) -> None:
        counts = counts_of(mib)
        descriptor = os.memfd_create("bench-rows")
        os.truncate(descriptor, sum(counts) * 16 + len(counts) * len(COLUMNS) * mmap.PAGESIZE)
        *self._parts, self._joined, self._replaced = columns_in(mmap.mmap(descriptor, 0), counts)
        self._new = token_columns(counts[-1], seed=2)
        self._ends: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(RANKS):
            ours, theirs = socket.socketpair()
            with theirs:
                numbers = [str(each) for each in (theirs.fileno(), descriptor, mib, rank)]
                command = [sys.executable, "-m", "bench.peers.shared_rows", *numbers]
                self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno(), descriptor], cwd=ROOT))
            self._ends.append(ours)
        os.close(descriptor)
        self._ask(MAKE)
        self._truth: NDArray[np.int64] = np.sum([sums_of(part) for part in self._parts], 0)

    def roundtrip(self, replaced: Sequence[str]) -> float:
        """Seconds to make rows, read them here, replace columns, and read them again in the processes."""
        began = time.perf_counter()
        self._ask(MAKE)
        for name, whole in self._joined.items():
            np.concatenate([part[name] for part in self._parts], out=whole)
        seen = sums_of(self._joined)
        for name in replaced:
            np.copyto(self._replaced[name], self._new[name])
        mask = sum(1 << number for number, name in enumerate(COLUMNS) if name in replaced)
        sums = self._ask(READ + bytes([mask]))
        wall = time.perf_counter() - began
        assert agree(seen, self._truth)
        assert agree(sums, np.where(np.isin(list(COLUMNS), replaced), sums_of(self._new), self._truth))
        return wall

    def _ask(self, question: bytes) -> NDArray[np.int64]:
        """Ask all, then wait for all. Returns the sum of their answers."""
        for end in self._ends:
            end.send(question)
        answers: NDArray[np.int64] = np.sum([np.frombuffer(end.recv(64), np.int64) for end in self._ends], 0)
        return answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the sockets, which ends the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.wait()


def serve(end: socket.socket, descriptor: int, mib: int, rank: int) -> None:
    """Answer everything until the other end is closed."""
    counts = counts_of(mib)
    *parts, joined, replaced = columns_in(mmap.mmap(descriptor, 0), counts)
    own = token_columns(counts[rank], rank)
    half = slice(0, counts[0]) if rank == 0 else slice(counts[0], None)
    while question := end.recv(2):
        if question == MAKE:
            for name, column in own.items():
                np.copyto(parts[rank][name], column)
            end.send(np.zeros(len(COLUMNS), np.int64).tobytes())
        else:
            there = {
                name: (replaced if question[1] >> number & 1 else joined)[name] for number, name in enumerate(COLUMNS)
            }
            end.send(sums_of(there, half).tobytes())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as mine:
        serve(mine, *map(int, sys.argv[2:5]))
