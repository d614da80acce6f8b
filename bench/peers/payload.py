"""The rows that contestants transfer: token columns as in training, their content, and how they are read."""

import numpy as np
from numpy.typing import NDArray

COLUMNS = {"tokens": "int32", "loss_mask": "bool", "sampler_logprobs": "float32", "versions": "int32"}
TOKEN_BYTES = 13
SHORTEST, LONGEST = 256, 4096
STORE_BYTES = 3 * 2**30
"""Size of each project's object store, enough for all that any project keeps of 512 MiB."""


def row_lengths(mib: int, parts: int) -> list[NDArray[np.int64]]:
    """Tokens of each row of each part, log-uniform. Parts have equally many rows, and all together `mib` MiB."""
    mean = (LONGEST - SHORTEST) / np.log(LONGEST / SHORTEST)
    tokens = mib * 2**20 // TOKEN_BYTES
    rows = max(1, round(tokens / mean / parts))
    drawn = np.exp(np.random.default_rng(mib).uniform(np.log(SHORTEST), np.log(LONGEST), rows * parts))
    lengths = np.round(drawn * tokens / drawn.sum()).astype(np.int64)
    return np.split(lengths, parts)


def token_columns(tokens: int, seed: int) -> dict[str, NDArray[np.generic]]:
    """The values of each column, one per token."""
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, 150_000, tokens, np.int32),
        "loss_mask": rng.random(tokens, np.float32) < 0.8,
        "sampler_logprobs": -rng.random(tokens, np.float32),
        "versions": rng.integers(0, 4, tokens, np.int32),
    }


def checksum(values: NDArray[np.generic]) -> int:
    """A number that depends on every byte, computed at memory speed. Checksums of parts add up to that of the whole."""
    if values.dtype == np.bool_:
        return int(np.count_nonzero(values))
    words = values.reshape(-1).view(np.uint32)
    return int(np.add.reduce(words, dtype=np.uint32))


def agree(sums: NDArray[np.int64], truth: NDArray[np.int64]) -> bool:
    """True if the added checksums, one per column, are equal."""
    return bool((sums % 2**32 == truth % 2**32).all())
