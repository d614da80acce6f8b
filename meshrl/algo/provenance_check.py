"""Check that the log-probs that a loss reads come from the right model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from meshrl.data import is_ragged
from meshrl.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshrl.algo.base import Loss
    from meshrl.data import Column, Origin, RemoteColumn, Source


_PROMISED: Final[Mapping[str, tuple[Origin, str]]] = {
    "sampler_logprobs": ("sampler", "train on rows as `sampler.generate` returned them"),
    "logprobs": ("trainer", "call `batch = await policy.logprobs(batch)` before the update"),
    "reference_logprobs": ("reference", "call `batch = await reference.logprobs(batch)` before the update"),
}
"""The source that a column's name promises, and how to get such a column."""


class Sourced(Protocol):
    """An object that knows the sources of its columns, such as a `Batch`."""

    def __contains__(self, name: object) -> bool:
        """True if it has the column."""
        ...

    @property
    def stored(self) -> Mapping[str, Column | RemoteColumn]:
        """Its columns, remote ones included."""
        ...

    def source(self, name: str) -> Source | None:
        """Return what computed the column. None if unknown."""
        ...


def check_sources(batch: Sourced, loss: Loss, version: int | None = None) -> None:
    """Check that the log-probs for a loss come from the right models. Every backend's `update` calls this first.

    `sampler_logprobs` must come from the sampler, `logprobs` from the trainer, and `reference_logprobs` from the
    reference. `version` is the number of updates of the policy. If given, the trainer's log-probs must not be of a
    later version. A token column without a source, made by hand, is accepted. Raises DataError if one of these columns
    is missing, has another source, or does not have one number for each token.
    """
    for name in loss.columns:
        if name not in _PROMISED:
            continue
        role, remedy = _PROMISED[name]
        reads = f"{type(loss).__name__} reads `{name}`"
        if name not in batch:
            raise DataError(f"{reads}, which the batch does not have: {remedy}")
        if not is_ragged(batch.stored[name]):
            raise DataError(f"{reads} of each token, but the batch's is not a token column (a Ragged): {remedy}")
        source = batch.source(name)
        if source is None:
            continue
        if source.role != role:
            raise DataError(
                f"{reads}, which must come from the {role}, but the batch's were computed by the {source.role}: "
                f"{remedy}"
            )
        if role == "trainer" and version is not None and (source.newest or 0) > version:
            raise DataError(
                f"{reads}, which the trainer computed at version {source.newest}, and this policy is at version "
                f"{version}: they are of weights that it has not had; {remedy}"
            )
