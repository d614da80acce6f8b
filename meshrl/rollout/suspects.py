"""Rows that crash whatever samples them, recognised by how often they do."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from meshrl.errors import DataError, described, shortened

FATAL: Final = 5
"""Deaths in a row, each of a replica that drew the same row, that are no accident."""
_NAMED: Final = 3
"""Groups that an error names."""


class Suspects:
    """The groups that replicas were drawing when they died. Knows no time and no tasks."""

    def __init__(self) -> None:
        self._died: dict[int, list[int]] = {}
        """Of each such group, the replicas that have died since it was last drawn to its end."""

    def died(self, replica: int, drawing: Mapping[int, object], error: Exception) -> None:
        """A replica has died. DataError where one of the groups that it was drawing has now ended too many.

        `drawing`: by group, its prompt.
        """
        for label in drawing:
            self._died.setdefault(label, []).append(replica)
        fatal = [label for label in drawing if len(self._died[label]) >= FATAL]
        if fatal:
            named = ", ".join(f"{label} ({shortened(drawing[label])})" for label in fatal[:_NAMED])
            more = f" and {len(fatal) - _NAMED} more" if len(fatal) > _NAMED else ""
            one = "" if len(fatal) == 1 else ", or one of them,"
            group = "group" if len(fatal) == 1 else "groups"
            raise DataError(f"{group} {named}{more}: drawing this{one} ends {_told(self._died[fatal[0]], error)}")

    def drawn(self, labels: Iterable[int]) -> None:
        """These groups are whole: no replica died of them."""
        for label in labels:
            self._died.pop(label, None)


def check_call(prompts: int, died: Sequence[int], error: Exception, replicas: int) -> None:
    """DataError where a call beside the stream, of so many prompts, has ended so many in a row.

    Such a call goes to all replicas at once, and is lost with any of them: more deaths than those of one row are bad
    luck.
    """
    if len(died) >= FATAL * replicas:
        raise DataError(f"a call of {prompts} prompts beside the stream ends {_told(died, error)}")


def _told(died: Sequence[int], error: Exception) -> str:
    return (
        f"the sampler's replicas: {len(died)} died of it one after another (numbers {', '.join(map(str, died))}), and "
        f"it is not drawn again. Leave the row out, or bound what it takes, as by sampling.max_tokens. The last death: "
        f"{described(error)}"
    )
