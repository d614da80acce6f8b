"""What a client of ours and a server send each other: verbs of a policy and a sampler, with whole batches."""

from importlib import import_module
from typing import Final, Literal, TypeAlias, cast

import msgspec

from meshrl.algo import Loss
from meshrl.config import Config
from meshrl.data import Batch, Metrics
from meshrl.errors import DataError

Verb: TypeAlias = Literal["update", "forward_backward", "step", "logprobs", "encode", "weights"]
_LOSSES: Final = vars(import_module("meshrl.algo"))
"""What meshrl.algo exports, by name: losses are those that are tables."""
MSGPACK: Final = "application/msgpack"


class Packed(msgspec.Struct, frozen=True):
    """A batch: the header and the parts of its wire format."""

    header: bytes
    parts: list[bytes]

    @classmethod
    def of(cls, batch: Batch) -> "Packed":
        """Pack a batch that is here."""
        header, parts = batch.to_wire()
        return cls(header, [bytes(part) for part in parts])

    def batch(self) -> Batch:
        """Return the batch. DataError if it is none."""
        return Batch.from_wire(self.header, self.parts)


class Named(msgspec.Struct, frozen=True):
    """A loss of meshrl: the name of its class, and its fields."""

    kind: str
    fields: dict[str, object]

    @classmethod
    def of(cls, loss: Loss) -> "Named":
        """Describe a loss. DataError if it is not one of meshrl's own, which are all that a server can know."""
        kind = type(loss).__name__
        if not isinstance(loss, Config) or _LOSSES.get(kind) is not type(loss):
            raise DataError(f"a server knows the losses of meshrl.algo alone, and {kind} is none: train here instead")
        return cls(kind, loss.model_dump(mode="json"))

    def loss(self) -> Loss:
        """Return the loss. DataError if there is none, or it has no such fields."""
        kind = _LOSSES.get(self.kind)
        if not (isinstance(kind, type) and issubclass(kind, Config) and hasattr(kind, "predicts")):
            raise DataError(f"there is no loss {self.kind!r} in meshrl.algo")
        try:
            return cast("Loss", kind.model_validate(self.fields))
        except ValueError as error:
            raise DataError(f"the loss {self.kind} cannot have these fields: {error}") from error


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A call of a policy's endpoint."""

    model_id: str
    seq_id: int
    verb: Verb
    batch: Packed | None = None
    loss: Named | None = None
    step: dict[str, float | tuple[float, float]] | None = None
    """Values of one step, in place of those of the server's table."""

    def batch_of(self) -> Batch:
        """Return the rows. DataError if there are none, or they cannot be read."""
        if self.batch is None:
            raise DataError(f"{self.verb} needs rows, and the request has none")
        return self.batch.batch()

    def rows(self) -> tuple[Batch, Loss]:
        """Return the rows and the loss. DataError if one is missing, or cannot be read."""
        if self.loss is None:
            raise DataError(f"{self.verb} needs a loss, and the request has none")
        return self.batch_of(), self.loss.loss()


class Generate(msgspec.Struct, frozen=True):
    """A call of a sampler's `generate`, under a name by which it can come again."""

    name: str
    path: str | None
    """The weights. None for those of the base model."""
    prompts: Packed
    sampling: dict[str, object]
    beside: bool = False
    joins: bool = False


class Made(msgspec.Struct, frozen=True, tag="made"):
    """What a call returned."""

    batch: Packed | None = None
    sums: dict[str, tuple[float, float]] = {}
    path: str = ""
    """Of weights that were kept for samplers."""
    version: int = 0

    @property
    def metrics(self) -> Metrics:
        """The metrics."""
        return Metrics(self.sums)
