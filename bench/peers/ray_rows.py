"""Bare Ray's contestant: two makers, two readers, and a controller that divides the rows anew.

Run by bench/handoff.py. Questions, answers and rows of one length are as in verl_dispatch.py. HOW:

torch       dicts of tensors: torch.cat, chunks by rows, sent, with RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1, which is
            twice as fast as cloned chunks without it
numpy       dicts of arrays, joined and put once. Each reader takes its slice of the mapped data
references  hand-written by an expert: each reader gets both makers' references, and joins its half of each
"""

import os
import time
import warnings

os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONWARNINGS"] = "ignore"  # about read-only tensors, in the actors too
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402 -- Ray reads the setting when it is imported
import ray  # noqa: E402
import torch  # noqa: E402
from contest import answer, start_ray  # noqa: E402
from payload import COLUMNS, STORE_BYTES, agree, checksum, token_columns  # noqa: E402


@ray.remote(num_cpus=0)
class Rows:
    """Makes rows, and reads them."""

    def prepare(self, rank, rows, tokens):
        """Make the rows. Returns a checksum of each column."""
        columns = token_columns(rows * tokens, rank)
        self.arrays = {name: column.reshape(rows, tokens) for name, column in columns.items()}
        self.tensors = {name: torch.from_numpy(array) for name, array in self.arrays.items()}
        return sums_of(self.arrays)

    def make(self, how):
        """Return the rows."""
        return self.tensors if how == "torch" else self.arrays

    def read(self, columns):
        """Read every byte."""
        return sums_of(columns)

    def read_slice(self, columns, index):
        """Read one half of the rows."""
        return sums_of({name: np.array_split(column, 2)[index] for name, column in columns.items()})

    def read_parts(self, index, *parts):
        """Join one half of the rows of each part, and read it."""
        halves = [{name: np.array_split(column, 2)[index] for name, column in part.items()} for part in parts]
        return sums_of(joined(halves, np.concatenate))


def sums_of(columns):
    """A checksum of each column."""
    return np.array([checksum(np.asarray(columns[name])) for name in COLUMNS])


def joined(parts, concatenate):
    """Join the rows of all parts."""
    return {name: concatenate([part[name] for part in parts]) for name in COLUMNS}


class Contest:
    """The actors, and their measurements."""

    def __init__(self):
        self.makers, self.readers = ([Rows.remote() for _ in range(2)] for _ in range(2))
        self.truth = None

    def prepare(self, rows, tokens):
        """Make the rows: `rows` per maker, of `tokens` tokens each."""
        self.truth = sum(ray.get([maker.prepare.remote(i, rows, tokens) for i, maker in enumerate(self.makers)]))
        return 2 * rows * tokens

    def handoff(self, how):
        """Seconds of a handoff."""
        began = time.perf_counter()
        made = [maker.make.remote(how) for maker in self.makers]
        sums = ray.get(getattr(self, how)(made))
        wall = time.perf_counter() - began
        assert agree(sum(sums), self.truth)
        return wall

    def torch(self, made):
        """The way `torch` above."""
        whole = joined(ray.get(made), torch.cat)
        halves = zip(*(whole[name].chunk(2) for name in COLUMNS), strict=True)
        chunks = [dict(zip(COLUMNS, half, strict=True)) for half in halves]
        return [reader.read.remote(chunk) for reader, chunk in zip(self.readers, chunks, strict=True)]

    def numpy(self, made):
        """The way `numpy`: one put."""
        whole = ray.put(joined(ray.get(made), np.concatenate))
        return [reader.read_slice.remote(whole, index) for index, reader in enumerate(self.readers)]

    def references(self, made):
        """The way `references`: no data passes here."""
        return [reader.read_parts.remote(index, *made) for index, reader in enumerate(self.readers)]


def main():
    start_ray(STORE_BYTES)
    contest = Contest()
    answer({"prepare": contest.prepare, "handoff": contest.handoff})
    ray.shutdown()


if __name__ == "__main__":
    main()
