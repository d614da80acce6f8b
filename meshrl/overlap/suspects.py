"""Rows that crash every replica that samples them, recognised by the number of crashes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from meshrl.errors import DataError, described, shortened

FATAL: Final = 5
"""Successive deaths, each of a replica that sampled the same row, that are not an accident."""
_NAMED: Final = 3
"""Number of groups that an error names."""


class Suspects:
    """The groups that replicas were sampling when they died. It needs no clock and no tasks."""

    def __init__(self) -> None:
        self._died: dict[int, list[int]] = {}
        """By group, the replicas that have died since it was last sampled to its end."""

    def died(self, replica: int, drawing: Mapping[int, object], error: Exception) -> None:
        """Record the death of a replica. DataError if one of the groups that it sampled has now ended too many.

        `drawing`: the prompt of each group.
        """
        for label in drawing:
            self._died.setdefault(label, []).append(replica)
        fatal = [label for label in drawing if len(self._died[label]) >= FATAL]
        if fatal:
            named = ", ".join(f"{label} ({shortened(drawing[label])})" for label in fatal[:_NAMED])
            more = f" and {len(fatal) - _NAMED} more" if len(fatal) > _NAMED else ""
            one = "" if len(fatal) == 1 else ", or one of them,"
            group = "group" if len(fatal) == 1 else "groups"
            raise DataError(f"{group} {named}{more}: drawing this{one} kills {_told(self._died[fatal[0]], error)}")

    def drawn(self, labels: Iterable[int]) -> None:
        """Clear groups that are complete, because no replica died of them."""
        for label in labels:
            self._died.pop(label, None)


def check_call(prompts: int, died: Sequence[int], error: Exception, replicas: int) -> None:
    """Raise DataError if a call with `prompts` prompts, outside the stream, has ended too many replicas in a row.

    Such a call uses all replicas at once and is lost with any of them. So it takes more deaths than for one row to rule
    out bad luck.
    """
    if len(died) >= FATAL * replicas:
        raise DataError(f"a call outside the stream, with {prompts} prompts, kills {_told(died, error)}")


def _told(died: Sequence[int], error: Exception) -> str:
    return (
        f"the sampler's replicas: {len(died)} died of it one after another (numbers {', '.join(map(str, died))}), and "
        f"it is not drawn again. Leave the row out, or bound what it takes, as by sampling.max_tokens. The last death: "
        f"{described(error)}"
    )
