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
"""Of the secret that a caller shows first."""


Kind: TypeAlias = Service | Literal["call", "stream"]
"""What is asked for."""


class Question(msgspec.Struct, array_like=True, tag="q", frozen=True):
    """A call, or another service."""

    number: int
    """Of the connection's questions, from 0."""
    service: Kind
    ask: Ask | None
    """Of a call or a stream."""
    values: bytes
    """Arguments; empty where there are none."""


class Answer(msgspec.Struct, array_like=True, tag="a", frozen=True):
    """What came of a question."""

    number: int
    value: bytes
    """Empty for None."""
    leased: bool = False
    """Whether shared memory in it is kept until its reader says that he has it."""
    broken: bool = False
    """Whether the value is a text that says why the question did not get through."""


class Taken(msgspec.Struct, array_like=True, tag="t", frozen=True):
    """The answer's shared memory is leased by its reader."""

    number: int


Frame: TypeAlias = Question | Answer | Taken
encode: Final[Callable[[object], bytes]] = msgspec.msgpack.Encoder().encode
decode: Final[Callable[[Buffer], Frame]] = msgspec.msgpack.Decoder(Frame).decode

_PLAIN: Final = (int, float, str, bytes, bool)


def dumped(value: object) -> tuple[bytes, list[Segment]]:
    """A value as bytes, and the shared memory that it names, to be kept until it has arrived."""
    if value is None:
        return b"", []
    if type(value) in _PLAIN:
        return pickle.dumps(value, 5), []
    with in_transit() as segments:
        file = io.BytesIO()
        Pickler(file, protocol=5).dump(value)
        return file.getvalue(), segments


def loaded(values: bytes) -> object:
    """The value again, its arrays read-only. It comes from a process that has shown the secret of this run."""
    if not values:
        return None
    value: object = pickle.loads(values)  # noqa: S301 -- see above
    seal_arrays(value)
    return value
