"""Bodies of requests: read up to a limit, and decompressed up to it."""

import asyncio
from typing import Final

from starlette.requests import Request

from meshrl.errors import DataError

_DRAINED: Final = 16
"""A body of this many times the limit is read to its end, so that its client hears why it is refused."""
_STEP: Final = 1 << 10
"""Bytes that are decompressed at once. They become 32 MiB at most, whatever the limit is."""


class TooLarge(DataError):
    """A body is larger than the limit."""

    def __init__(self, message: str, begin: bytes) -> None:
        super().__init__(message)
        self.begin: Final = begin
        """The first bytes of the body, decompressed."""


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """Return the body of a request, decompressed. TooLarge if it has more than `most` bytes.

    TimeoutError if it does not come within some seconds, and DataError if it cannot be decompressed.
    """
    kind = request.headers.get("content-encoding", "identity").lower()
    if kind not in ("identity", "zstd"):
        raise DataError(f"a body is encoded as {kind!r}: send it as it is, or compressed as zstd")
    body, size = bytearray(), 0
    async with asyncio.timeout(seconds):
        async for piece in request.stream():
            size += len(piece)
            if size <= most:
                body += piece
            if size > _DRAINED * most:
                break
    message = f"the body has more than {most >> 20} MiB (tinker.body_mib): send fewer rows at once"
    raw = bytes(body)
    if kind == "zstd":
        raw = _decompressed(raw, most + 1, partial=size > most)
    if size > most or len(raw) > most:
        raise TooLarge(message, raw[: 1 << 16])
    return raw


def _decompressed(body: bytes, most: int, *, partial: bool) -> bytes:
    try:
        import zstandard  # noqa: PLC0415 -- only for compressed bodies
    except ModuleNotFoundError as error:
        raise DataError(
            "the body is compressed, and this server lacks the package zstandard: send it as it is"
        ) from error
    frame = zstandard.ZstdDecompressor().decompressobj()
    pieces, place = bytearray(), 0
    try:
        while len(pieces) < most and place < len(body) and not frame.eof:
            pieces += frame.decompress(body[place : place + _STEP])
            place += _STEP
    except zstandard.ZstdError as error:
        if not partial:
            raise DataError(f"the body cannot be decompressed: {error}") from error
    if len(pieces) < most and not partial:
        if not frame.eof:
            raise DataError(f"the compressed body ends after {len(body)} bytes, within a frame: send all of it")
        if after := len(frame.unused_data) + max(0, len(body) - place):
            raise DataError(f"{after} bytes follow the compressed body: send one frame of zstd")
    return bytes(pieces[:most])
