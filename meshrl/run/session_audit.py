"""Audit the sessions of a server: check by its events that each request had its turn once, and each step gradients."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from meshrl.errors import DataError
from meshrl.events import Event, Request
from meshrl.run.audit import Verdict
from meshrl.run.folder import decoded, read_configuration, read_lines

_EVENTS = "events.jsonl"
_STEPS = ("optim_step", "step")


@dataclass(frozen=True)
class SessionAudit:
    """The result of an audit of a server's run."""

    folder: Path
    status: str
    """Status in summary.json, or `not ended` without that file."""
    requests: int
    verdicts: tuple[Verdict, ...]

    @property
    def holds(self) -> bool:
        """True if all guarantees hold."""
        return all(verdict.holds for verdict in self.verdicts)


class _Summary(msgspec.Struct, frozen=True):
    status: str


def is_session(folder: Path) -> bool:
    """True if a run's folder is that of a server."""
    try:
        return "tinker" in read_configuration(folder)
    except (OSError, ValueError):
        return False


def audit_session(folder: Path) -> SessionAudit:
    """Check the guarantees of a server by the events of its run. Raises DataError if there are no requests in them."""
    summary = folder / "summary.json"
    status = decoded(summary, summary.read_bytes(), _Summary).status if summary.is_file() else "not ended"
    requests = list(_requests(folder, may_be_cut=status == "not ended"))
    if not requests:
        raise DataError(f"{folder / _EVENTS} has no requests to judge: no client has asked anything, or it was removed")
    order, gradients = list(_out_of_order(requests)), list(_without_gradients(requests))
    models, failed = {each.model for each in requests}, sum(each.error is not None for each in requests)
    counts = f"{len(requests):,} requests of {len(models):,} models, {failed:,} of them failed"
    steps = Counter(each.verb for each in requests if each.error is None)
    made = f"{sum(steps[verb] for verb in (*_STEPS, 'update')):,} steps"
    verdicts = (
        Verdict("each request of a model has its turn once, in the order of its number", counts, order),
        Verdict("each step has gradients", made, gradients),
    )
    return SessionAudit(folder, status, len(requests), verdicts)


def _requests(folder: Path, *, may_be_cut: bool) -> Iterator[Request]:
    events = read_lines(folder / _EVENTS, cast("type[Event]", Event), may_be_cut=may_be_cut)
    return (each for each in events if isinstance(each, Request))


def _out_of_order(requests: list[Request]) -> Iterator[str]:
    """Yield requests that came again, too early or too late. The first of a model is where this process began."""
    last: dict[str, int] = {}
    for each in requests:
        before = last.get(each.model, each.number - 1)
        if each.number <= before:
            yield f"request {each.number} of {each.model} had a turn after request {before}"
        elif each.number > before + 1:
            yield f"request {each.number} of {each.model} had its turn before request {before + 1}"
        last[each.model] = max(before, each.number)


def _without_gradients(requests: list[Request]) -> Iterator[str]:
    """Yield steps before which nothing was added since the last one. What came before this process is not known."""
    has: dict[str, bool | None] = {}
    for each in requests:
        if each.number == 0:
            has[each.model] = False
        elif each.verb in _STEPS:
            if each.error is None and has.get(each.model) is False:
                yield f"request {each.number} of {each.model} stepped without gradients"
            has[each.model] = False if each.error is None else None
        elif each.verb == "forward_backward":
            has[each.model] = True if each.error is None else None
        elif each.verb in ("update", "load_weights"):
            has[each.model] = False if each.error is None else None
