"""Messages between a sampler and its engine's process. Tokens and log-probs travel as bytes: int32, float32."""

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np

from meshrl_torch.wire.manifest import Offer


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


class Row(msgspec.Struct, frozen=True):
    """A sequence to continue."""

    number: int
    """Unique among all rows of this engine."""
    tokens: bytes
    max_tokens: int
    """New tokens at most."""
    seed: int


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Start to decode rows."""

    rows: list[Row]
    temperature: float
    top_p: float
    top_k: int
    ends: list[int]
    stop: list[str]


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Stop decoding these rows. With `told`, they come back as they are, aborted."""

    rows: list[int]
    told: bool


class Part(msgspec.Struct, frozen=True):
    """The place of a tensor in a bucket, and the fingerprint of its bytes."""

    name: str
    dtype: str
    """The name of the dtype in torch."""
    shape: list[int]
    start: int
    """Offset in bytes."""
    fingerprint: int
    """XXH3's 64 bits."""


class Bucket(msgspec.Struct, frozen=True):
    """Tensors in one file of the shared memory."""

    path: str
    parts: list[Part]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load new weights between two steps."""

    version: int
    buckets: list[Bucket]
    recompute: bool
    """True if running rows read their tokens again with the new weights."""
    probe: list[list[int]]
    """Sequences of tokens, whose log-probs under the new weights are returned."""
    offer: Offer | None = None
    """The offer of the policy's ranks, if the engine reads their broadcast. It then needs no buckets."""
    together: int = 1
    """Number of processes that read the broadcast at once."""

    @property
    def forms(self) -> Mapping[str, tuple[str, list[int]]]:
        """Dtype and shape of each tensor, by name."""
        if self.offer is not None:
            return {name: (self.offer.dtype, list(shape)) for name, shape in self.offer.shapes.items()}
        return {part.name: (part.dtype, part.shape) for bucket in self.buckets for part in bucket.parts}

    @property
    def places(self) -> list[tuple[str, list[tuple[str, str, list[int], int]]]]:
        """List files in shared memory, with the name, dtype, shape and offset in bytes of each tensor."""
        return [
            (bucket.path, [(part.name, part.dtype, part.shape, part.start) for part in bucket.parts])
            for bucket in self.buckets
        ]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready."""

    version: str
    """The version of its package."""
    tokens: int
    """Number of tokens that the model knows."""


class Done(msgspec.Struct, frozen=True):
    """A row that was decoded, or stopped."""

    number: int
    tokens: bytes
    """The new tokens."""
    logprobs: bytes
    spans: list[tuple[int, int]]
    """Versions, each with the index of the first new token that used it."""
    reason: str
    """`stop`, `length` or `abort`."""

    @classmethod
    def of(
        cls, number: int, tokens: list[int], logprobs: list[float], spans: list[tuple[int, int]], reason: str
    ) -> "Done":
        """Make it from numbers."""
        drawn, values = np.array(tokens, np.int32), np.array(logprobs, np.float32)
        return cls(number, drawn.tobytes(), values.tobytes(), spans, reason)


class Rows(msgspec.Struct, frozen=True, tag=True):
    """Rows that left the engine."""

    done: list[Done]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """New weights are in use, and all arrived as they were sent."""

    version: int
    steps: int
    """Number of steps that the engine had made."""
    seconds: float
    """Seconds in which it made none."""
    logprobs: bytes
    """Log-probs of the probe's tokens, except the first of each sequence."""
    way: str = ""
    """How a broadcast came, such as "by gloo"."""


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


Order = Generate | Leave | Load
Answer = Ready | Rows | Loaded | Refused | Failed

to_engine: Final = msgspec.msgpack.Decoder(Start | Order)
to_sampler: Final = msgspec.msgpack.Decoder(Answer)
encode: Final = msgspec.msgpack.Encoder().encode
