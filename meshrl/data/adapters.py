"""Which adapter each row of a batch is for: a text column, `adapter`."""

from collections.abc import Collection
from typing import Final

from meshrl.data.batch import Batch
from meshrl.errors import DataError, did_you_mean

ADAPTER: Final = "adapter"
"""The column, text or None by row."""
DEFAULT_ADAPTER: Final = "default"
"""The adapter of rows that name none: that of `policy.lora`."""
BASE: Final = ""
"""Stands for the model without an adapter."""


def adapters_of(batch: Batch, known: Collection[str]) -> tuple[str, ...]:
    """Return the adapter of each row by name: that of its column, or else `DEFAULT_ADAPTER` if it is known, or `BASE`.

    An empty text is `BASE` too. DataError if a row names an adapter that is not `known`.
    """
    default = DEFAULT_ADAPTER if DEFAULT_ADAPTER in known else BASE
    if ADAPTER not in batch:
        return (default,) * len(batch)
    column = batch.objects(ADAPTER)
    names = tuple(default if name is None else str(name) for name in column)
    for name in sorted(set(names) - {BASE, *known}):
        hint = did_you_mean(name, known, "{!r}")
        raise DataError(
            f"{batch.place(names.index(name))} names the adapter {name!r}, and this model has "
            f"{', '.join(map(repr, known)) or 'none'}: {f'{hint} ' if hint else ''}add it with add_adapter, or declare "
            "it in policy.adapters; a sampler gets it by publish"
        )
    return names
