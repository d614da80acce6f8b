"""The source of a column of log-probs: the sampler, the trainer at a version, or the reference."""

from collections.abc import Iterable
from typing import Literal, Self, TypeAlias

import msgspec

from meshrl.errors import DataError

Origin: TypeAlias = Literal["sampler", "trainer", "reference"]
"""The roles that compute columns of log-probs."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """The source of a token column: `Source("sampler")`, `Source("reference")` or `Source.trainer(version)`.

    `oldest` and `newest` are the known policy versions of the trainer among the rows. The other sources have none. The
    version that sampled a token is in the column `versions`.
    """

    role: Origin
    oldest: int | None = None
    newest: int | None = None

    @classmethod
    def trainer(cls, version: int) -> Self:
        """The trainer at this version of its policy."""
        return cls("trainer", version, version)

    def __str__(self) -> str:
        if self.oldest is None:
            return self.role
        return f"{self.role}@{self.oldest}" + (f"-{self.newest}" if self.newest != self.oldest else "")


def joined(name: str, sources: Iterable[Source | None]) -> Source | None:
    """Join the sources of several parts of the column `name`. Trainers give the range of their versions.

    A source that is known for some rows holds for all. So a loss still refuses rows after they were joined with rows of
    an unknown source. Returns None if no source is known. Raises DataError if the roles differ.
    """
    found = set(sources)
    if len(found) <= 1:  # nearly always, and cheap
        return found.pop() if found else None
    known = [source for source in found if source is not None]
    roles = sorted({source.role for source in known})
    if len(roles) > 1:
        raise DataError(
            f"column `{name}` was computed by the {' in one part and by the '.join(roles)} in another: log-probs of "
            "different models are different quantities: keep them in columns with different names"
        )
    oldest = [source.oldest for source in known if source.oldest is not None]
    newest = [source.newest for source in known if source.newest is not None]
    return Source(known[0].role, min(oldest, default=None), max(newest, default=None))
