"""Sums of the large files of checkpoints: ranks verify what they read, and the controller reads none of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from xxhash import xxh3_64_digest

SUMMED_BYTES: Final = 1 << 20
"""Size in bytes of a block, which has a sum, and fits into a core's cache. The last block of a tensor is shorter."""


class Sums(msgspec.Struct, frozen=True):
    """The sums of a file, as JSON next to it. A rank that reads the file verifies each block that it reads.

    Each sum is XXH3's 64 bits, big-endian.
    """

    size: int
    """Of the file, in bytes."""
    head: bytes
    """The sum of what is before the tensors."""
    tensors: Mapping[str, bytes]
    """The sums of each tensor's blocks, one after another."""

    @staticmethod
    def beside(file: Path) -> Path:
        """Return where the sums of a file are."""
        return file.with_name(f"{file.name}.sums")

    @classmethod
    def of(cls, file: Path) -> "Sums | None":
        """Read the sums of a file. None if it has none. Raises OSError, or ValueError if they are not valid."""
        try:
            return msgspec.json.decode(cls.beside(file).read_bytes(), type=cls)
        except FileNotFoundError:
            return None

    def matches(self, file: Path) -> bool:
        """Read a whole safetensors file. Returns whether it is as it was written."""
        with file.open("rb") as opened:
            length = opened.read(8)
            text = opened.read(min(int.from_bytes(length, "little"), self.size))
            if xxh3_64_digest(length + text) != self.head:
                return False
            entries = msgspec.json.decode(text)
            for name, sums in self.tensors.items():
                start, end = entries[name]["data_offsets"]
                opened.seek(len(length) + len(text) + start)
                sizes = (min(SUMMED_BYTES, end - first) for first in range(start, end, SUMMED_BYTES))
                if b"".join(xxh3_64_digest(opened.read(size)) for size in sizes) != sums:
                    return False
        return True
