"""How a model reads the rows of a pass: packed into one sequence, or padded, each row as its own sequence."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol, cast

from torch import Tensor, nn

from meshrl.data import Ragged
from meshrl.errors import ModelError
from meshrl_torch.model.attention import NAME, Attend
from meshrl_torch.model.packing import MicroBatch, Rows, micro_batches, padded_batches
from meshrl_torch.model.vision import Taken


class Layout(Protocol):
    """A way to read rows. Both ways compute for each row what the model computes for the row alone."""

    @property
    def name(self) -> Literal["packed", "padded"]:
        """Its name in `packing` of a role's table."""
        ...

    @property
    def attention(self) -> str:
        """Transformers' name of the attention that it needs."""
        ...

    @property
    def why(self) -> str:
        """Why rows are not packed. Empty if they are."""
        ...

    def split(self, tokens: Ragged, rows: Rows, learn: Ragged | None, budget: int) -> Iterator[MicroBatch]:
        """Divide rows into micro-batches of at most `budget` tokens."""
        ...

    def read(
        self, body: nn.Module, ids: Tensor, positions: Tensor, attend: Attend, images: Taken | None = None
    ) -> Tensor:
        """Return the last hidden states [batch, tokens, hidden] of ids and positions, int64[batch, tokens].

        `images`: what the body takes for the images in them, with the ids.
        """
        ...


@dataclass(frozen=True)
class PackedRows:
    """Rows follow each other in one sequence. Attention is meshrl's own, and nothing else mixes tokens."""

    name: Literal["packed", "padded"] = "packed"
    attention: str = NAME
    why: str = ""

    def split(self, tokens: Ragged, rows: Rows, learn: Ragged | None, budget: int) -> Iterator[MicroBatch]:
        """Divide rows into micro-batches without padding. What rows share is computed once."""
        return micro_batches(tokens, rows, learn, budget)

    def read(
        self, body: nn.Module, ids: Tensor, positions: Tensor, attend: Attend, images: Taken | None = None
    ) -> Tensor:
        """Return the last hidden states. ModelError for images."""
        if images:
            raise ModelError(f"{type(body).__name__} packs rows, and rows with images are read padded")
        return cast(
            "Tensor", body(input_ids=ids, position_ids=positions, use_cache=False, attend=attend).last_hidden_state
        )


@dataclass(frozen=True)
class PaddedRows:
    """Rows begin together, and shorter ones are padded at the end, which a causal model does not see in their tokens.

    All that mixes tokens is the model's own code: attention of any kind, convolutions, recurrent states.
    """

    attention: str = "sdpa"
    why: str = ""
    """Why rows are not packed."""
    name: Literal["packed", "padded"] = "padded"

    def split(self, tokens: Ragged, rows: Rows, learn: Ragged | None, budget: int) -> Iterator[MicroBatch]:
        """Divide rows into micro-batches of rows of about one length."""
        return padded_batches(tokens, rows, learn, budget)

    def read(
        self, body: nn.Module, ids: Tensor, positions: Tensor, attend: Attend, images: Taken | None = None
    ) -> Tensor:
        """Return the last hidden states. The model numbers positions itself."""
        given = {"input_ids": ids, "use_cache": False}
        return cast("Tensor", (images.read(body, **given) if images else body(**given)).last_hidden_state)


PACKED: Final = PackedRows()
