"""A model's weights at one version, as they travel from a policy to a sampler."""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from meshrl.ragged import frozen
from meshrl.sharding import Array


class Weights:
    """Named tensors and the number of updates that made them. Immutable.

    Arrays of any shape, bfloat16 through `ml_dtypes`. An array that owns its memory is taken without a
    copy and frozen; a view (such as `tensor.numpy()`, which a trainer goes on writing) is copied.
    """

    def __init__(self, version: int, tensors: Mapping[str, Array]) -> None:
        self._version = version
        self._tensors = MappingProxyType({name: frozen(array, f"weight `{name}`") for name, array in tensors.items()})
        self._digest: str | None = None

    @property
    def version(self) -> int:
        """How many updates made these weights."""
        return self._version

    @property
    def tensors(self) -> Mapping[str, Array]:
        """The arrays by parameter name, read-only."""
        return self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(array.nbytes for array in self._tensors.values())

    def fingerprint(self) -> str:
        """A hex digest of names, dtypes, shapes and bytes, whatever the version; computed once."""
        if self._digest is not None:
            return self._digest
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self._tensors):
            array = self._tensors[name]
            digest.update(repr((name, array.dtype.name, array.shape)).encode())
            digest.update(array.reshape(-1).view(np.uint8).data)
        self._digest = digest.hexdigest()
        return self._digest

    def with_version(self, version: int) -> "Weights":
        """The same tensors, not copied, under another version."""
        return Weights(version, self._tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Weights):
            return NotImplemented
        return self._version == other.version and self.fingerprint() == other.fingerprint()

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, memo: object) -> "Weights":
        return self

    def __repr__(self) -> str:
        return f"Weights(version {self._version}, {len(self._tensors)} tensors, {self.nbytes:,} bytes)"
