"""References to values that ranks of one process share."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from meshrl.data import Column, frozen, private
from meshrl.mesh import Ref


class LocalRef(Ref):
    """A value that ranks of this process share. It is not copied, because nobody can write to it."""

    def __init__(self, value: object) -> None:
        self.value: object = value
        if isinstance(value, np.ndarray) and (value.flags.writeable or not value.flags.owndata):
            self.value = frozen(value.copy())
        elif type(value) is dict:  # columns
            self.value = {name: private(column) for name, column in cast("dict[str, Column]", value).items()}

    @classmethod
    async def fetch(cls, held: Sequence[Ref]) -> list[object]:
        """Return the values. Mutable Python values are copied when a column is put together."""
        return [each.value for each in cast("Sequence[LocalRef]", held)]
