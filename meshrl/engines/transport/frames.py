"""The content of frames: requests to a process, its answers, and acknowledgements of answers."""

import io
import pickle
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import msgspec
from typing_extensions import Buffer

from meshrl.engines.hosting import Ask, Pickler, Service
from meshrl.mesh import Segment, in_transit, seal_arrays

TOKEN_BYTES: Final = 32
"""Bytes of the secret that a caller shows first."""


Kind: TypeAlias = Service | Literal["call", "stream"]
"""Kinds of questions."""


class Question(msgspec.Struct, array_like=True, tag="q", frozen=True):
    """A call, or another service."""

    number: int
    """The number of the question on its connection, from 0."""
    service: Kind
    ask: Ask | None
    """For a call or stream."""
    values: bytes
    """The arguments. Empty if there are none."""


class Answer(msgspec.Struct, array_like=True, tag="a", frozen=True):
    """The answer to a question."""

    number: int
    value: bytes
    """Empty for None."""
    leased: bool = False
    """True if its shared memory is kept until the reader has confirmed it."""
    broken: bool = False
    """True if the value is a text that says why the question was lost."""


class Taken(msgspec.Struct, array_like=True, tag="t", frozen=True):
    """Confirms that the reader has leased the answer's shared memory."""

    number: int


Frame: TypeAlias = Question | Answer | Taken
encode: Final[Callable[[object], bytes]] = msgspec.msgpack.Encoder().encode
decode: Final[Callable[[Buffer], Frame]] = msgspec.msgpack.Decoder(Frame).decode

_PLAIN: Final = (int, float, str, bytes, bool)


def dumped(value: object) -> tuple[bytes, list[Segment]]:
    """Pickle a value, and list its shared memory, to keep until it has arrived."""
    if value is None:
        return b"", []
    if type(value) in _PLAIN:
        return pickle.dumps(value, 5), []
    with in_transit() as segments:
        file = io.BytesIO()
        Pickler(file, protocol=5).dump(value)
        return file.getvalue(), segments


def loaded(values: bytes) -> object:
    """Unpickle a value, with read-only arrays. It comes from a process that has shown the secret of this run."""
    if not values:
        return None
    value: object = pickle.loads(values)  # noqa: S301 -- see above
    seal_arrays(value)
    return value
