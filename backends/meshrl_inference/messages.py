"""What a sampler and its engine's process say to each other. Tokens and log-probs travel as bytes: int32, float32."""

from typing import Final

import msgspec
import numpy as np


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: what the engine is made with."""

    model: str
    """A Hugging Face folder."""
    dtype: str
    max_tokens: int
    """The longest sequence."""
    slots: int
    threads: int
    """Of each of the engine's workers."""
    tp: int
    """How many workers each matrix is split over."""
    gpus: list[str]
    """By CUDA's names, those that the engine is to see; none: what its process sees."""
    kv_cache_mib: int | None
    memory_share: float
    eager: bool
    sleep: bool
    """Whether to hold no memory of the GPU while no row is decoded."""
    own: dict[str, bool]
    """Options that this engine has alone."""


class Row(msgspec.Struct, frozen=True):
    """A sequence to go on after."""

    number: int
    """No other row of this engine, now or earlier, has it."""
    tokens: bytes
    max_tokens: int
    """New ones, at most."""
    seed: int


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Begin to decode rows."""

    rows: list[Row]
    temperature: float
    top_p: float
    top_k: int
    ends: list[int]
    stop: list[str]


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Stop decoding these rows; with `told` they come back as they are, aborted."""

    rows: list[int]
    told: bool


class Part(msgspec.Struct, frozen=True):
    """Where a tensor lies in a bucket, and the fingerprint of its bytes."""

    name: str
    dtype: str
    """torch's name."""
    shape: list[int]
    start: int
    """In bytes."""
    fingerprint: int
    """XXH3's 64 bits."""


class Bucket(msgspec.Struct, frozen=True):
    """Tensors in one file of the shared memory."""

    path: str
    parts: list[Part]


class Load(msgspec.Struct, frozen=True, tag=True):
    """Take new weights between two steps."""

    version: int
    buckets: list[Bucket]
    recompute: bool
    """Whether running rows read their tokens again with the new weights."""
    probe: list[list[int]]
    """Sequences of tokens, to tell what the new weights make of them."""

    @property
    def places(self) -> list[tuple[str, list[tuple[str, str, list[int], int]]]]:
        """Files in shared memory, and what lies where: name, dtype, shape, start in bytes."""
        return [
            (bucket.path, [(part.name, part.dtype, part.shape, part.start) for part in bucket.parts])
            for bucket in self.buckets
        ]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine can be used."""

    version: str
    """Of its package."""
    tokens: int
    """How many different ones the model knows."""


class Done(msgspec.Struct, frozen=True):
    """A row that is decoded, or was left."""

    number: int
    tokens: bytes
    """The new ones."""
    logprobs: bytes
    spans: list[tuple[int, int]]
    """Versions, and the new token from which on each was used."""
    reason: str
    """`stop`, `length` or `abort`."""

    @classmethod
    def of(
        cls, number: int, tokens: list[int], logprobs: list[float], spans: list[tuple[int, int]], reason: str
    ) -> "Done":
        """The same, of numbers."""
        drawn, values = np.array(tokens, np.int32), np.array(logprobs, np.float32)
        return cls(number, drawn.tobytes(), values.tobytes(), spans, reason)


class Rows(msgspec.Struct, frozen=True, tag=True):
    """Rows that left the engine."""

    done: list[Done]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """New weights are in use, and all of them arrived as they were sent."""

    version: int
    steps: int
    """How many steps the engine had made."""
    seconds: float
    """How long it made none."""
    logprobs: bytes
    """Of the probe's tokens, but the first of each sequence."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """New weights were not taken: the engine goes on with those that it has."""

    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine has failed, and its process ends."""

    text: str


Order = Generate | Leave | Load
Answer = Ready | Rows | Loaded | Refused | Failed

to_engine: Final = msgspec.msgpack.Decoder(Start | Order)
to_sampler: Final = msgspec.msgpack.Decoder(Answer)
encode: Final = msgspec.msgpack.Encoder().encode
