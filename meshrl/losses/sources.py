"""Whether the log-probs that a loss reads come from the model whose they must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from meshrl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshrl.losses.loss import Loss
    from meshrl.ragged import Role, Source

_PROMISED: Final[Mapping[str, tuple[Role, str]]] = {
    "sampler_logprobs": ("sampler", "train on rows as `sampler.generate` returned them"),
    "logprobs": ("trainer", "call `batch = await policy.logprobs(batch)` before the update"),
    "reference_logprobs": ("reference", "call `batch = await reference.logprobs(batch)` before the update"),
}
"""What a column's name says of its source, and how one comes by such a column."""


class Sourced(Protocol):
    """What knows the sources of its columns: a `Batch`."""

    def __contains__(self, name: object) -> bool:
        """Whether it has the column."""
        ...

    def source(self, name: str) -> Source | None:
        """What computed the column; None where that is not known."""
        ...


def check_sources(batch: Sourced, loss: Loss) -> None:
    """Refuse log-probs of another model than the loss asks for: every backend's `update` calls this first.

    `sampler_logprobs` must come from the sampler, `logprobs` from the trainer, at whatever version, and
    `reference_logprobs` from the reference. A column without a source, made by hand, is accepted. DataError if one of
    these columns is missing or has another source.
    """
    for name in loss.columns:
        if name not in _PROMISED:
            continue
        role, remedy = _PROMISED[name]
        reads = f"{type(loss).__name__} reads `{name}`"
        if name not in batch:
            raise DataError(f"{reads}, which the batch does not have: {remedy}")
        source = batch.source(name)
        if source is not None and source.role != role:
            raise DataError(
                f"{reads}, which must come from the {role}, but the batch's were computed by the {source.role}: "
                f"{remedy}"
            )
