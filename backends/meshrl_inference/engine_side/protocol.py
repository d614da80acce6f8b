"""Messages between a sampler and its engine's process, and the interface of an engine.

Tokens and log-probs travel as bytes: int32, float32. Importable without torch.
"""

import os
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np

from meshrl_torch.wire.manifest import Manifest

WEIGHTS: Final = "weights"
CACHE: Final = "kv_cache"
"""Engines' names for the two parts of a GPU's memory."""
PROBES: Final = 8
"""Most sequences of a probe."""
CPU_CACHE_MIB: Final = 512
"""Default size of the KV cache on a CPU."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: the arguments of the engine."""

    model: str
    """A Hugging Face folder."""
    dtype: str
    max_tokens: int
    """The longest sequence."""
    slots: int
    threads: int
    """CPU threads of each of the engine's workers."""
    tp: int
    """Number of workers that each matrix is split over."""
    gpus: list[str]
    """GPUs that the engine is to see, by CUDA's names. Empty: those that its process sees."""
    kv_cache_mib: int | None
    memory_share: float
    eager: bool
    sleep: bool
    """True to free the GPU's memory while no row is decoded."""
    own: dict[str, bool | str | None]
    """Options that only this engine has."""
    args: dict[str, Any] = {}
    """Further arguments of the engine, by its own names."""
    adapters: int = 0
    """Most adapters whose rows are decoded in one step. 0 if none will be loaded."""
    max_rank: int = 0
    """The highest rank of an adapter."""
    image_token: int | None = None
    """The token whose embedding is replaced by a feature of an image. None if the model reads texts alone."""


class Row(msgspec.Struct, frozen=True):
    """A sequence to continue."""

    number: int
    """Unique among all rows of this engine."""
    tokens: bytes
    max_tokens: int
    """New tokens at most."""
    seed: int
    adapter: str = ""
    """Name of its adapter, which changes nothing before it is loaded. Empty if it is for the model alone."""
    rule: str = ""
    """What holds the new tokens, as the engine reads it. Empty if nothing does."""
    images: list[str] = []
    """Names of its images, in the order of their tokens."""


class SentTensor(msgspec.Struct, frozen=True):
    """A tensor in a message."""

    dtype: str
    """The name of the dtype in torch."""
    shape: list[int]
    data: bytes


class SeenImage(msgspec.Struct, frozen=True):
    """What the sampler's processor made of an image."""

    fingerprint: str
    tokens: int
    """Number of tokens of a row which get features of it."""
    tensors: dict[str, SentTensor]
    """Pixels and sizes, as the model in transformers takes them."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Start to decode rows."""

    rows: list[Row]
    temperature: float
    top_p: float
    top_k: int
    ends: list[int]
    stop: list[str]
    images: dict[str, SeenImage] = {}
    """The different images of all rows, by name."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop decoding these rows. With `wanted`, they come back as they are, aborted."""

    rows: list[int]
    wanted: bool


class SharedTensor(msgspec.Struct, frozen=True):
    """A tensor in shared memory, and the fingerprint of its bytes."""

    name: str
    dtype: str
    """The name of the dtype in torch."""
    shape: list[int]
    start: int
    """Offset in bytes."""
    fingerprint: int
    """XXH3's 64 bits."""


class SharedBucket(msgspec.Struct, frozen=True):
    """Tensors in one file of the shared memory."""

    path: str
    tensors: list[SharedTensor]


class AdapterOf(msgspec.Struct, frozen=True):
    """Says that weights are those of one adapter alone, which change a layer by `alpha / rank * B A`."""

    name: str
    rank: int
    alpha: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load new weights between two steps."""

    version: int
    buckets: list[SharedBucket]
    recompute: bool
    """True if running rows read their tokens again with the new weights."""
    probe: list[list[int]]
    """Sequences of tokens, whose log-probs under the new weights are returned."""
    manifest: Manifest | None = None
    """Of the policy's ranks, if the engine reads their broadcast. It then needs no buckets."""
    together: int = 1
    """Number of processes that read the broadcast at once."""
    number: int = 0
    """Unique among all loads of this engine, and rising. Rows name their weights by it: 0 stands for the first ones."""
    adapter: AdapterOf | None = None
    """The adapter that the weights are of. None if they are a whole model's."""

    @property
    def specs(self) -> Mapping[str, tuple[str, list[int]]]:
        """Dtype and shape of each tensor, by name."""
        if self.manifest is not None:
            dtypes = self.manifest.dtypes
            return {name: (dtypes[name], list(shape)) for name, shape in self.manifest.shapes.items()}
        return {each.name: (each.dtype, each.shape) for bucket in self.buckets for each in bucket.tensors}


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready."""

    version: str
    """The version of its package."""
    tokens: int
    """Number of tokens that the model knows."""


class FinishedRow(msgspec.Struct, frozen=True):
    """A row that was decoded, or stopped."""

    number: int
    tokens: bytes
    """The new tokens."""
    logprobs: bytes
    spans: list[tuple[int, int]]
    """Numbers of loads, each with the index of the first new token that was decoded after it."""
    reason: str
    """`stop`, `length` or `abort`."""

    @classmethod
    def of(
        cls, number: int, tokens: list[int], logprobs: list[float], spans: list[tuple[int, int]], reason: str
    ) -> "FinishedRow":
        """Make it from numbers."""
        return cls(
            number, np.array(tokens, np.int32).tobytes(), np.array(logprobs, np.float32).tobytes(), spans, reason
        )


class Rows(msgspec.Struct, frozen=True, tag=True):
    """Rows that left the engine."""

    done: list[FinishedRow]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """New weights are in use, and all arrived as they were sent."""

    version: int
    steps: int
    """Number of steps that the engine had made."""
    seconds: float
    """Seconds in which it made none."""
    logprobs: bytes
    """Log-probs of the probe's tokens, except the first of each sequence."""
    transport: str = ""
    """How they arrived, such as "by gloo"."""
    cache: float = 0.0
    """The highest share of the KV cache that rows held since the load before."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """New weights were refused. The engine keeps its old ones, or decodes nothing until others come."""

    text: str
    lost: str = ""
    """Who has not sent them, if some did not arrive."""
    usable: bool = True
    """False if some of the new weights are in use."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine has failed, and its process ends."""

    text: str


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter, with which no row is decoded."""

    name: str


Order = Generate | Abort | Load | Drop
Answer = Ready | Rows | Loaded | Refused | Failed

to_engine: Final = msgspec.msgpack.Decoder(Start | Order)
to_sampler: Final = msgspec.msgpack.Decoder(Answer)
encode: Final = msgspec.msgpack.Encoder().encode


class Outcome(NamedTuple):
    """How an engine, or one of its processes, has loaded weights."""

    transport: str = ""
    """How they arrived, such as "by gloo". Empty if not all arrived as they were sent."""
    begun: bool = False
    """True if some of the model's tensors are new."""
    reason: str = ""
    lost: str = ""
    """Who has not sent weights that did not arrive."""

    @classmethod
    def of_all(cls, outcomes: Iterable["Outcome"]) -> "Outcome":
        """Combine those of an engine's processes: the first failure if there is one."""
        each = list(outcomes)
        failed = [outcome for outcome in each if not outcome.transport]
        return failed[0]._replace(begun=any(outcome.begun for outcome in each)) if failed else each[0]


IN_SHARED_MEMORY: Final = Outcome("through shared memory", begun=True)
"""The outcome for weights that were checked before."""


def set_environment(settings: Start) -> None:
    """Set the variables that each engine and torch read at import."""
    os.environ.update(OMP_NUM_THREADS=str(settings.threads), HF_HUB_OFFLINE="1")
    if settings.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)


class Engine(Protocol):
    """An engine, and the rows that it decodes. The process's main thread calls everything.

    A backend's module `engine` makes one by its function `start`.
    """

    version: str
    """The version of the engine's package."""
    tokens: int
    """Number of tokens that the model knows."""
    steps: int
    """Number of decode steps."""
    finished: list[FinishedRow]
    """Rows that were decoded, or stopped and are to be returned. `worker` removes them."""

    @property
    def cache_use(self) -> float:
        """Share of the KV cache that rows held after the last step."""
        ...

    @property
    def processes(self) -> list[BaseProcess]:
        """Its processes, one for each place along tp. Empty if it computes in this one."""
        ...

    @property
    def decodes(self) -> bool:
        """True if there are rows to decode."""
        ...

    def add(self, order: Generate, salt: str) -> None:
        """Start to decode rows. They share cached prefixes only with rows of the same salt."""
        ...

    def abort(self, rows: list[int], *, wanted: bool) -> None:
        """Stop decoding these rows. With `wanted`, they are added to `finished`, now or in a step, aborted."""
        ...

    def step(self, orders: Connection) -> None:
        """Decode until a row has ended, but only briefly, and no longer than until there is an order to read."""
        ...

    def load(self, order: Load) -> Outcome:
        """Use new weights from the next step on. Names, dtypes and shapes were checked before, and bytes in buckets.

        If a broadcast fails after some tensors are new, the engine decodes nothing until other weights come.
        """
        ...

    def drop(self, adapter: str) -> None:
        """Forget an adapter, with which no row is decoded."""
        ...

    def read(self, probe: list[list[int]], salt: str, adapter: str) -> list[float]:
        """Return the log-probs of tokens except the first of each sequence. Other rows are decoded in between.

        `adapter`: the one to read with. Empty: the model alone.
        """
        ...

    def sleep(self) -> None:
        """Free the GPU's memory, because there is nothing to decode."""
        ...

    def wake(self, names: list[str]) -> None:
        """Take GPU memory again for `WEIGHTS`, `CACHE` or both, whichever sleep."""
        ...
