"""verl's contestant: batches between two WorkerGroups of two workers, by DP_COMPUTE_PROTO and by its other ways.

Run by bench/handoff.py and bench/roundtrip.py in .peers/verl, with one question per line on standard input (see
contest.py) and one answer per line. `prepare` makes the rows, all of one length. This favours verl, because nothing is
padded. In `handoff`, one group makes the rows and the other reads them. In `roundtrip`, one group makes the rows, the
controller reads them and replaces columns, and the same group reads them. HOW:

default            DataProto by DP_COMPUTE_PROTO, serialised by torch.save
numpy              the same with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy
future             the same with blocking=False: a DataProtoFuture, which each reader fetches whole and splits itself
future_tensordict  the same with a TensorDict
nd                 numpy, and the dispatch of verl's newer workers (make_nd_compute_dataproto_dispatch_fn)
tensordict         a TensorDict by that dispatch

Ray's RAY_ENABLE_ZERO_COPY_TORCH_TENSORS is on. It makes a TensorDict up to three times as fast, and has no effect on a
DataProto, which verl turns into bytes or arrays itself.
"""

import os
import time
import warnings

os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["PYTHONWARNINGS"] = "ignore"  # about read-only tensors, in the workers too
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402 -- Ray reads the setting when it is imported
import ray  # noqa: E402
import torch  # noqa: E402
from contest import answer, start_ray  # noqa: E402
from payload import COLUMNS, STORE_BYTES, agree, checksum, token_columns  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.single_controller.base.decorator import (  # noqa: E402
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.base.worker import Worker  # noqa: E402
from verl.single_controller.ray.base import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402

METHOD = "VERL_DATAPROTO_SERIALIZATION_METHOD"
ND = make_nd_compute_dataproto_dispatch_fn("rows")


@ray.remote
class Rows(Worker):
    """Makes rows, and reads them."""

    def __init__(self):
        super().__init__()
        self._register_dispatch_collect_info("rows", dp_rank=self.rank, is_collect=True)

    @register(Dispatch.ONE_TO_ALL)
    def prepare(self, rows, tokens):
        """Make the rows. Returns a checksum of each column."""
        columns = token_columns(rows * tokens, self.rank)
        self.tensors = {name: torch.from_numpy(column).view(rows, tokens) for name, column in columns.items()}
        return sums_of(self.tensors)

    @register(Dispatch.ONE_TO_ALL)
    def serialize(self, method):
        """Set how a DataProto is serialised from now on."""
        os.environ[METHOD] = method

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make(self):
        """Return the rows."""
        return DataProto.from_dict(self.tensors)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make_later(self):
        """Return the rows as a future."""
        return DataProto.from_dict(self.tensors)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make_tensordict(self):
        """Return the rows as a TensorDict."""
        return TensorDict(self.tensors, batch_size=len(self.tensors["tokens"]))

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make_tensordict_later(self):
        """Return the rows as a TensorDict in a future."""
        return TensorDict(self.tensors, batch_size=len(self.tensors["tokens"]))

    @register(Dispatch.DP_COMPUTE_METRIC)
    def read(self, data):
        """Read every byte."""
        return sums_of(data.batch if isinstance(data, DataProto) else data)

    @register({"dispatch_fn": ND["dispatch_fn"], "collect_fn": lambda _, output: output})
    def read_nd(self, data):
        """Read every byte."""
        return sums_of(data.batch if isinstance(data, DataProto) else data)


def sums_of(tensors):
    """A checksum of each column."""
    return np.array([checksum(tensors[name].contiguous().numpy()) for name in COLUMNS])


WAYS = {
    "default": ("", "make", "read"),
    "numpy": ("numpy", "make", "read"),
    "future": ("numpy", "make_later", "read"),
    "nd": ("numpy", "make", "read_nd"),
    "future_tensordict": ("", "make_tensordict_later", "read"),
    "tensordict": ("", "make_tensordict", "read_nd"),
}


class Contest:
    """Two groups, and their measurements."""

    def __init__(self):
        self.maker, self.reader = (
            RayWorkerGroup(RayResourcePool([2], use_gpu=False, max_colocate_count=1), RayClassWithInitArgs(Rows))
            for _ in range(2)
        )
        self.truth = self.new = None

    def prepare(self, rows, tokens):
        """Make the rows: `rows` per worker, of `tokens` tokens each."""
        self.truth = sum(self.maker.prepare(rows, tokens))
        columns = token_columns(2 * rows * tokens, seed=2)
        self.new = {name: torch.from_numpy(column).view(-1, tokens) for name, column in columns.items()}
        return 2 * rows * tokens

    def handoff(self, how):
        """Seconds of a handoff."""
        make, read = self._way(how)
        began = time.perf_counter()
        sums = getattr(self.reader, read)(getattr(self.maker, make)())
        wall = time.perf_counter() - began
        assert agree(sum(sums), self.truth)
        return wall

    def roundtrip(self, how, replaced):
        """Seconds of a round trip. `replaced`: the names of the columns."""
        make, read = self._way(how)
        began = time.perf_counter()
        data = getattr(self.maker, make)()
        tensors = data.batch if isinstance(data, DataProto) else data
        seen = sums_of(tensors)
        for name in replaced:
            tensors[name] = self.new[name]
        sums = getattr(self.maker, read)(data)
        wall = time.perf_counter() - began
        assert agree(seen, self.truth)
        changed = np.isin(list(COLUMNS), replaced)
        assert agree(sum(sums), np.where(changed, sums_of(self.new), self.truth))
        return wall

    def _way(self, how):
        """The methods of this way. Also sets the serialisation of DataProto in every process."""
        method, make, read = WAYS[how]
        if os.environ.get(METHOD, "") != method:
            os.environ[METHOD] = method
            for group in (self.maker, self.reader):
                group.serialize(method)
        return make, read


def main():
    start_ray(STORE_BYTES)
    contest = Contest()
    answer({"prepare": contest.prepare, "handoff": contest.handoff, "roundtrip": contest.roundtrip})
    ray.shutdown()


if __name__ == "__main__":
    main()
