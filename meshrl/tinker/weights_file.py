"""Weights for samplers in a folder: the bytes of their buckets, and what is in them."""

from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from meshrl.data import AdapterOf, Bucket, Entry, Probe, Ragged, Weights
from meshrl.errors import Damaged

_INDEX: Final = "weights.json"
_BYTES: Final = "weights-{}.bin"


class _Bucket(msgspec.Struct, frozen=True):
    index: dict[str, Entry]
    nbytes: int


class _Index(msgspec.Struct, frozen=True):
    version: int
    adapter: AdapterOf | None
    buckets: list[_Bucket]
    probe_lengths: list[int]
    """Tokens of each row of the probe. None without a probe."""
    probe_tokens: list[int]
    probe_logprobs: list[float]


def write_weights(weights: Weights, folder: Path) -> None:
    """Write weights that are here into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    buckets: list[_Bucket] = []
    for number, bucket in enumerate(weights.buckets):
        (folder / _BYTES.format(number)).write_bytes(bucket.memory.data)
        buckets.append(_Bucket(dict(bucket.index), bucket.nbytes))
    probe = weights.probe
    lengths, tokens, logprobs = (
        (probe.tokens.lengths.tolist(), probe.tokens.values.tolist(), probe.logprobs.tolist())
        if probe
        else ([], [], [])
    )
    index = _Index(weights.version, weights.adapter, buckets, lengths, tokens, logprobs)
    (folder / _INDEX).write_bytes(msgspec.json.encode(index))


def version_in(folder: Path) -> int:
    """Return the version of the weights of a folder."""
    return msgspec.json.decode((folder / _INDEX).read_bytes(), type=_Index).version


def read_weights(folder: Path) -> Weights:
    """Return the weights of a folder, whose files are mapped into memory. Damaged if they differ from the written."""
    index = msgspec.json.decode((folder / _INDEX).read_bytes(), type=_Index)
    buckets: list[Bucket] = []
    for number, each in enumerate(index.buckets):
        path = folder / _BYTES.format(number)
        memory = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
        bucket = Bucket(each.index, each.nbytes, np.asarray(memory))
        if damaged := list(bucket.damaged()):
            raise Damaged(f"{path} differs from what was written, in {damaged[0]}: save the weights again")
        buckets.append(bucket)
    probe = None
    if index.probe_lengths:
        ends = np.cumsum([0, *index.probe_lengths])
        tokens = Ragged(np.array(index.probe_tokens, np.int32), ends)
        probe = Probe(tokens, np.array(index.probe_logprobs, np.float32))
    return Weights.of(index.version, buckets, probe, index.adapter)
