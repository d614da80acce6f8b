"""Write the files of a run: configuration, numbers, samples and a summary. And its progress line."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self, cast

import msgspec
import numpy as np
import tomli_w

from meshrl import log
from meshrl.data import Batch
from meshrl.errors import DataError, described
from meshrl.events import Event, clock
from meshrl.run.disk import write_whole
from meshrl.run.folder import beginning, cut, take
from meshrl.tasks import StepAccount
from meshrl.trackers import Trackers

if TYPE_CHECKING:
    from meshrl.run.progress import Progress


_SAMPLED = 8
_METRICS = "metrics.jsonl"
_SAMPLES = "samples.jsonl"
_EVALUATIONS = "evaluations.jsonl"
_GROUPS = "groups.jsonl"
GROWING = (_METRICS, _SAMPLES, _EVALUATIONS, _GROUPS)
"""Files that a run adds to, and one that goes on cuts to what they were at its checkpoint."""
_PART = "summary.json.part"
_RESERVED = 16384
"""Bytes that the summary has on the disk from the beginning, should it be full at the end."""


class Recorder:
    """Writes `folder`; a folder of that name that an earlier run left is renamed, never deleted.

    That happens when this run has made a step, or ends well: `settle`. Until then it writes into another folder, which
    stays where the run fails before its first step.
    A run that goes on keeps the folder: what was appended to its files after the checkpoint is cut off, and numbers
    count from the run's first beginning. The events of each earlier part are kept as events-1.jsonl and so on.

    config.toml     the resolved configuration
    metrics.jsonl   an object a step: `step`, `seconds` since the start, and the step's numbers
    evaluations.jsonl   an object an evaluation beside the steps: `step`, as many as were done when it began, and so on
    groups.jsonl    a `StepAccount` a step: what became of which prompts; `meshrl audit` reads it
    samples.jsonl   now and then some rows: prompt, completion, reward, answer, reward_error
    logs/           what the process of each rank writes, MESH-RANK.log: see `engines.hosting.rank_log`
    summary.json    at the end, however the run ends: status, steps, wall_s, tokens, first and last reward
    """

    def __init__(
        self,
        folder: Path,
        resolved: Mapping[str, object],
        goes_on: Mapping[str, int] | None = None,
        check: Callable[[], None] = lambda: None,
        trackers: Trackers | None = None,
    ) -> None:
        """Open a run's folder.

        `goes_on`: what `sizes` told when the checkpoint was written that the run goes on from; empty where the run
        begins again in the folder of an attempt that had none; None for a new folder. `check`: raises where the folder
        is another run's. `trackers`: are told the numbers and samples too, once the folder is the run's own.
        """
        self._trackers = trackers or Trackers(())
        self._place = folder
        self.folder: Path = beginning(folder) if goes_on is None else folder
        """Where the files are now."""
        self._check = check
        self.began: float = clock()
        """Since when `seconds` count, on the event loop's clock."""
        folder = self.folder
        if goes_on is not None:
            cut(folder, goes_on, GROWING)
        folder.mkdir(parents=True, exist_ok=True)
        self._resolved = _without_none(resolved)
        write_whole(folder / "config.toml", tomli_w.dumps(self._resolved).encode())
        self._earlier = 0.0
        """Seconds until the checkpoint."""
        self._steps = 0
        self._tokens = 0.0
        self._rewards: list[float] = []
        self._extra: dict[str, object] = {}
        self._begins = self._recall()
        self._progress: Progress | None = None
        self.shows_progress = True
        """Whether somebody looks on."""
        with ExitStack() as opened:  # closed where one that follows fails
            self._metrics, self._samples, self._groups = (
                opened.enter_context((folder / name).open("ab")) for name in (_METRICS, _SAMPLES, _GROUPS)
            )
            self._part = opened.enter_context((folder / _PART).open("wb", buffering=0))
            self._part.write(b" " * _RESERVED)
            opened.pop_all()

    def settle(self) -> None:
        """Take the run's own folder; an earlier run's makes room for it."""
        if self.folder != self._place:
            self._check()
            take(self._place, self.folder)
            self.folder = self._place
        self._trackers.begin(self.folder, self._resolved, self._begins)

    def _stay(self) -> None:
        """Leave the files of a run that has made no step where they are."""
        if self.folder != self._place:
            log.warning(
                f"no step was made: {self._place} is the earlier run's, and this one's files are in {self.folder}"
            )
            self._place = self.folder

    def begin(self, count: int, done: int = 0) -> None:
        """Show progress from here on, over `count` steps, of which so many are done."""
        self._end_progress()
        if not self.shows_progress:
            return
        from meshrl.run.progress import Progress  # noqa: PLC0415 -- it imports rich, which ranks need not

        self._progress = Progress(count, done)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's numbers. `reward` is the mean reward; `tokens`, where there, adds to the summary's."""
        self._check()
        numbers = {name: float(value) for name, value in values.items()}
        _line(self._metrics, {"step": step, "seconds": round(self._seconds, 4), **numbers})
        self._trackers.metrics(step, numbers)
        self._count(numbers)
        if self._progress:
            self._progress.show(numbers)

    def account(self, account: StepAccount) -> None:
        """Write what became of prompts in a step, or between two, where anything did."""
        self._check()
        self._write_account(account)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write what an evaluation found that began when so many steps were done."""
        self._check()
        numbers = {name: float(value) for name, value in values.items()}
        with (self.folder / _EVALUATIONS).open("ab") as file:
            _line(file, {"step": step, "seconds": round(self._seconds, 4), **numbers})
        self._trackers.metrics(step, numbers)

    async def samples(self, step: int, batch: Batch) -> None:
        """Write some rows of a batch, evenly spread over it."""
        chosen = np.unique(np.linspace(0, len(batch) - 1, min(_SAMPLED, len(batch))).astype(np.int64))
        texts = [name for name in ("prompt", "completion", "answer", "reward_error") if name in batch]
        some = await batch.select(chosen).only(*texts, *(["rewards"] if "rewards" in batch else [])).load()
        self._check()
        columns: dict[str, Sequence[object]] = {name: some.objects(name) for name in texts}
        if "rewards" in some:
            columns["reward"] = some.rewards.tolist()
        rows = [{name: column[index] for name, column in columns.items()} for index in range(len(some))]
        for row in rows:
            _line(self._samples, {"step": step, **row})
        self._trackers.samples(step, rows)

    def events(self, events: Sequence[Event], began: float) -> None:
        """Tell trackers what happened, which events.jsonl has; `began`: as `Tracker.events` has it."""
        self._trackers.events(events, began)

    def sizes(self) -> Mapping[str, int]:
        """The bytes of the files that grow, which the disk has from here on."""
        sizes: dict[str, int] = {}
        for file in (self._metrics, self._samples, self._groups):
            os.fsync(file.fileno())
            sizes[Path(file.name).name] = file.tell()
        if (self.folder / _EVALUATIONS).exists():
            with (self.folder / _EVALUATIONS).open("ab") as file:
                os.fsync(file.fileno())
                sizes[_EVALUATIONS] = file.tell()
        return sizes

    def summary(self, **values: object) -> None:
        """Add to summary.json: numbers, texts, and lists and tables of them."""
        self._extra |= values

    def close(self, error: BaseException | None, rest: StepAccount | None = None) -> None:
        """Write summary.json, whole or not at all. `error`: what ended the run, None where it finished.

        `rest`: what became of prompts since the last account. DataError, and nothing written, where the folder is
        another run's and no error has said so. OSError where a file could not be written to its end, as on a full disk;
        the summary is written all the same, and tells it.
        """
        self._end_progress()
        with ExitStack() as ends:  # each of them, whatever those after it raise: the last comes first
            ends.callback(self._stay)
            ends.callback(self._part.close)
            ends.push(lambda *raised: self._write_summary(raised[1] if error is None else error))
            for file in (self._samples, self._metrics, self._groups):
                ends.callback(file.close)
            if error is None:
                self.settle()
            if rest is not None and self._is_own(error):
                self._write_account(rest)

    def _is_own(self, error: BaseException | None) -> bool:
        """Whether the folder is this run's; DataError where it is not, and no error has said so."""
        try:
            self._check()
        except DataError:
            if error is None:
                raise
            return False
        return True

    def _write_summary(self, error: BaseException | None) -> None:
        summary = self._summarise(error)
        folder = None
        try:
            if self._is_own(error):
                self._part.seek(0)
                self._part.write(msgspec.json.format(_encode(summary), indent=2) + b"\n")
                self._part.truncate()
                (self.folder / _PART).replace(self.folder / "summary.json")
                folder = self.folder
        finally:
            self._trackers.end(folder, summary)

    def _summarise(self, error: BaseException | None) -> dict[str, object]:
        summary: dict[str, object] = {
            "status": _status(error),
            "steps": self._steps,
            "wall_s": round(self._seconds, 3),
            "tokens": int(self._tokens),
            "first_reward": self._rewards[0] if self._rewards else None,
            "last_reward": self._rewards[-1] if self._rewards else None,
            **self._extra,
        }
        if error is not None:
            summary["error"] = described(error)
        return summary

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    @property
    def _seconds(self) -> float:
        return self._earlier + clock() - self.began

    def _recall(self) -> int:
        """Count the steps that are in the file already; the one that comes next."""
        begins = 0
        file = self.folder / _METRICS
        for number, line in enumerate(file.read_bytes().splitlines() if file.exists() else (), 1):
            try:
                numbers = msgspec.json.decode(line, type=dict[str, float | None])
            except (ValueError, RecursionError) as error:  # of msgspec and of UTF-8
                raise DataError(
                    f"{file}, line {number}, is not as a run wrote it: {error}. Restore the file, or start a run with "
                    "another name"
                ) from error
            self._count({name: float("nan") if value is None else value for name, value in numbers.items()})
            self._earlier = numbers.get("seconds") or 0.0
            begins = int(numbers.get("step") or 0) + 1
        return begins

    def _write_account(self, account: StepAccount) -> None:
        if account.step is not None or account.happened:
            _line(self._groups, account)

    def _count(self, numbers: Mapping[str, float]) -> None:
        self._steps += 1
        self._tokens += numbers.get("tokens", 0.0)
        if "reward" in numbers:
            self._rewards.append(numbers["reward"])

    def _end_progress(self) -> None:
        if self._progress:
            self._progress.close()
            self._progress = None


def _status(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    return "interrupted" if isinstance(error, KeyboardInterrupt | asyncio.CancelledError) else "failed"


def _without_none(value: object) -> dict[str, object]:
    """TOML has no null: a key without a value is left out."""
    plain = msgspec.to_builtins(value, enc_hook=_plain)

    def kept(each: object) -> object:
        if isinstance(each, dict):
            return {key: kept(inner) for key, inner in each.items() if inner is not None}
        return [kept(inner) for inner in each] if isinstance(each, list | tuple) else each

    return cast("dict[str, object]", kept(plain))


def _line(file: BinaryIO, record: Mapping[str, object] | StepAccount) -> None:
    file.write(_encode(record) + b"\n")
    file.flush()


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return cast("object", value.item())
    return value.tolist() if isinstance(value, np.ndarray) else str(value)
