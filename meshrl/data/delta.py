"""Delta weights: only the changes since the last version, for samplers that share no memory with the policy.

A chain is the history of one bucket: its first bytes, and the changes from each version to the next. A sampler with an
earlier version fetches only the changes since. A new sampler fetches the whole chain.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data.bucket import Bucket, Entry
from meshrl.data.weights import AdapterOf, Probe, Weights
from meshrl.mesh import Array, Bytes, Put, Ref, current_rank, fetch, pool

_LONGEST: Final = 1.0
"""A chain starts again when its changes exceed this fraction of the bucket's bytes."""


class Change(NamedTuple):
    """The 16-bit words that differ between two versions of a bucket. Lossless for any numbers."""

    mask: NDArray[np.uint8]
    """One bit for each word of the bucket."""
    words: NDArray[np.uint16]
    """The new words, in order."""

    @classmethod
    def between(cls, old: Bytes, new: Bytes) -> "Change":
        """Compare two buffers of the same size."""
        before, after = _words(old), _words(new)
        changed = before != after
        return cls(np.packbits(changed), after[changed])

    @property
    def nbytes(self) -> int:
        """Size in bytes when sent."""
        return self.mask.nbytes + self.words.nbytes

    def apply(self, memory: Bytes) -> None:
        """Turn the old bytes into the new ones, in place."""
        words = _words(memory)
        words[np.unpackbits(self.mask, count=len(words)).view(np.bool_)] = self.words


class DeltaChain:
    """The history of a bucket, on the rank that makes it."""

    def __init__(self, place: tuple[int, int], first: Bucket) -> None:
        self.token: Final = secrets.token_hex(8)
        self.place: Final = place
        """The rank of the policy, and the number of the bucket."""
        self._first = first
        self._last = first
        self._changes: list[Change] = []
        self._refs: list[Ref] = []
        """References to the first version and the changes, kept for others."""

    def extended(self, new: Bucket) -> "DeltaChain":
        """Return the history with a new version, or a new history if the changes are too large."""
        if new.index.keys() != self._last.index.keys() or new.memory.shape != self._last.memory.shape:
            return DeltaChain(self.place, new)
        change = Change.between(self._last.memory, new.memory)
        if sum(each.nbytes for each in self._changes) + change.nbytes > _LONGEST * new.nbytes:
            return DeltaChain(self.place, new)
        self._changes.append(change)
        self._last = new
        return self

    def newest(self) -> "DeltaVersion":
        """Return the newest version."""
        sent = self._changes[-1].nbytes if self._changes else self._first.nbytes
        return DeltaVersion(self, len(self._changes), self._last, sent)

    def hold(self, put: Put, number: int) -> Sequence[Ref]:
        """Keep the history up to a version for others."""
        for each in range(len(self._refs), number + 1):
            self._refs.append(put(self._changes[each - 1] if each else self._first))
        return tuple(self._refs[: number + 1])


class DeltaVersion(Bucket):
    """One version of a bucket, on the rank that made it."""

    def __init__(self, chain: DeltaChain, number: int, bucket: Bucket, sent: int) -> None:
        super().__init__(bucket.index, bucket.nbytes, bucket.segment or bucket.memory)
        self._chain = chain
        self._number = number
        self.sent: Final = sent
        """Bytes that a holder of the previous version needs."""

    def hold(self, put: Put, limit: int, shares: bool) -> Bucket:
        """Hold the changes, or the bucket itself if it need not be sent."""
        if self.nbytes <= limit or (shares and self.segment):
            return super().hold(put, limit, shares)
        history = self._chain.hold(put, self._number)
        ref = DeltaRef(self._chain.token, self._chain.place, history, dict(self.index), self.nbytes)
        return Bucket(self.index, self.nbytes, ref)


class WeightSource:
    """Makes the weights of a policy's rank, each time from the same tensors."""

    def __init__(self, *, changes: bool) -> None:
        """`changes`: send only changes to readers without shared memory. This keeps the previous version."""
        self._changes = changes
        self._rank = current_rank().index
        self._chains: list[DeltaChain] = []
        self._latest: Weights | None = None
        """The last weights. Keeps their memory from being reused before a first reader has them."""

    def weights(
        self, version: int, tensors: Iterable[tuple[str, Array]], probe: Probe | None, adapter: AdapterOf | None = None
    ) -> Weights:
        """Copy the tensors, of any shape, into weights."""
        whole = self._latest = Weights.streamed(version, tensors, probe, adapter)
        if not self._changes:
            return whole
        chains = [chain.extended(bucket) for chain, bucket in zip(self._chains, whole.buckets, strict=False)]
        new = enumerate(whole.buckets[len(chains) :], len(chains))
        self._chains = chains + [DeltaChain((self._rank, number), bucket) for number, bucket in new]
        return Weights.of(version, [chain.newest() for chain in self._chains], probe, adapter)


class DeltaRef(Ref):
    """A version of a bucket, held as the first version and the changes since."""

    def __init__(
        self, token: str, place: tuple[int, int], history: Sequence[Ref], index: Mapping[str, Entry], nbytes: int
    ) -> None:
        self._token, self._place, self._history, self._index, self._nbytes = token, place, history, index, nbytes
        self.transport: str = f"changes through {history[0].transport}"

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """Return the buckets, each made from the newest version that this process has fetched."""
        return [await each.bucket() for each in cast("Sequence[DeltaRef]", held)]

    async def bucket(self) -> Bucket:
        """Return this version."""
        key = self._place, self._nbytes
        last = _fetched.get(key)
        first = last.number + 1 if last and last.token == self._token and last.number < len(self._history) else 0
        values = await fetch(self._history[first:])
        missing = [values[each] for each in self._history[first:]]
        old = last.bucket if last and first else cast("Bucket", missing.pop(0))
        bucket = self._changed(old, cast("list[Change]", missing)) if missing else old
        _fetched[key] = _Fetched(self._token, len(self._history) - 1, bucket)
        return bucket

    def _changed(self, old: Bucket, changes: Sequence[Change]) -> Bucket:
        writing = pool.write(len(old.memory)) if old.segment else None
        memory = writing.memory if writing else np.empty(len(old.memory), np.uint8)
        np.copyto(memory, old.memory)
        for change in changes:
            change.apply(memory)
        memory.flags.writeable = False
        return Bucket(self._index, self._nbytes, writing.done() if writing else memory)

    def __reduce__(self) -> tuple[Callable[..., "DeltaRef"], tuple[object, ...]]:
        return DeltaRef, (self._token, self._place, self._history, self._index, self._nbytes)


class _Fetched(NamedTuple):
    """A version of a bucket that this process has fetched."""

    token: str
    """Identifies the chain."""
    number: int
    bucket: Bucket


_fetched: Final[dict[tuple[tuple[int, int], int], _Fetched]] = {}
"""The last fetched version of each of a model's buckets, by place and size."""


def _words(memory: Bytes) -> NDArray[np.uint16]:
    """View a bucket's buffer, which is padded to a multiple of 64 bytes, as words."""
    return memory.view(np.uint16)
