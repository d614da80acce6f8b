"""Write the files of a run: configuration, numbers, samples and a summary."""

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

import msgspec
import numpy as np
import tomli_w

from meshrl import log
from meshrl.algo import effective_sample_size
from meshrl.data import Batch, Metrics, known_mean, why_unknown
from meshrl.errors import DataError, described
from meshrl.events import clock
from meshrl.run.folder import (
    EVALUATIONS,
    GROUPS,
    METRICS,
    SAMPLES,
    cut_files,
    read_lines,
    start_folder,
    take_over,
    write_whole,
)
from meshrl.run.trackers import Trackers, shown_in_trackers
from meshrl.tasks import StepAccount

if TYPE_CHECKING:
    from meshrl.run.progress import Progress

_MEANS: Final = {"turns": "turns", "truncated": "truncated", "tries": "tries", "conversation_count": "conversations"}
"""Columns whose mean is reported, and the metric's name."""
_PART: Final = "summary.json.part"
_MOST: Final = 1 << 30
"""Bytes of samples.jsonl beyond which no more tokens are written there."""
_RESERVED: Final = 16384
"""Bytes reserved on the disk for the summary, in case the disk is full at the end."""


def corrected(metrics: Metrics) -> dict[str, float]:
    """Statistics of an importance-sampling correction."""
    if "correction" in metrics and "correction_squared" in metrics and "effective_sample_size" not in metrics:
        return {"effective_sample_size": effective_sample_size(metrics)}
    return {}


def _signal(batch: Batch) -> dict[str, float]:
    """The share of groups in which all known rewards are equal, which give no signal to learn from."""
    if "groups" not in batch:
        return {}
    known = ~np.isnan(batch.rewards)
    _, group, counts = np.unique(batch.row("groups")[known], return_inverse=True, return_counts=True)
    most, least = np.full(len(counts), -np.inf), np.full(len(counts), np.inf)
    np.maximum.at(most, group, batch.rewards[known])
    np.minimum.at(least, group, batch.rewards[known])
    several = counts > 1
    return {"zero_std_groups": float((most == least)[several].mean())} if several.any() else {}


async def statistics(batch: Batch, *, worked: bool = False) -> dict[str, float]:
    """Compute the metrics of a batch of rollouts. Token columns that lie on ranks stay there.

    Raises DataError if the reward of every row is unknown, because there is nothing to learn from. With `worked`,
    meaning that programs have succeeded before, all may fail for a while, such as when one of their tools is down.
    """
    rewards = [name for name in batch.names if name.startswith("reward_") and name != "reward_error"]
    watched = ("rewards", "groups", "reward_error", "staleness", "agent_metrics", *_MEANS, *rewards)
    if names := [name for name in watched if name in batch]:
        batch = await batch.load(*names)
    stats: dict[str, float] = {"rows": len(batch), "tokens": float(batch.lengths.sum())}
    if "loss_mask" in batch and "loss_mask" not in batch.elsewhere and len(batch):
        mask = batch.loss_mask
        counts = np.diff(np.append(0, np.cumsum(mask.values, dtype=np.int64))[mask.offsets])
        # A row of unknown reward has no learned token.
        stats["completion_tokens"] = float(counts.sum()) / max(1, int(np.count_nonzero(counts)))
    elif "versions" in batch and "versions" not in batch.elsewhere and len(batch):  # episodes have no other tokens
        stats["completion_tokens"] = float((np.asarray(batch.versions.values, np.int32) >= 0).sum()) / len(batch)
    if "rewards" in batch and len(batch):
        unknown = np.isnan(batch.rewards)
        stats |= {"unknown_rewards": float(unknown.mean()), **_signal(batch)}
        means = {f"reward/{name.removeprefix('reward_')}": known_mean(batch.row(name)) for name in rewards}
        means["reward"] = known_mean(batch.rewards)
        stats |= {name: mean for name, mean in means.items() if not np.isnan(mean)}  # none over no rows
    if len(batch):
        stats |= {metric: float(batch.row(name).mean()) for name, metric in _MEANS.items() if name in batch}
    if "agent_metrics" in batch and len(batch):
        reported = cast("Sequence[Mapping[str, float]]", batch.objects("agent_metrics"))
        own = {name: [each[name] for each in reported if name in each] for name in dict.fromkeys(chain(*reported))}
        stats |= {f"agent/{name}": float(np.mean(values)) for name, values in own.items()}
    if "staleness" in batch and len(batch):
        versions = batch.row("staleness")
        stats |= {"staleness": float(versions.mean()), "staleness_max": float(versions.max())}
    if "reward_error" in batch:
        stats["reward_errors"] = float(sum(error is not None for error in batch.objects("reward_error")))
    if (why := why_unknown(batch)) and not (worked and "conversation_count" in batch):
        raise DataError(why)
    return stats


class Recorder:
    """Writes `folder`. The folder of an earlier run with that name is renamed, never deleted.

    `settle` renames it when this run has made a step or ends well. Until then the run writes into another folder, which
    stays if the run fails before its first step.
    A resumed run keeps the folder. It cuts off what was appended to files after the checkpoint, and its numbers count
    from the run's first start. Events of earlier parts are kept as events-1.jsonl and so on.

    config.toml     the resolved configuration
    metrics.jsonl   one object per step: `step`, `seconds` since the start, and the step's numbers
    evaluations.jsonl   one object per evaluation: `step`, the number of steps done when it began, and its numbers
    groups.jsonl    one `StepAccount` per step: what happened to which prompts, for `meshrl audit`
    samples.jsonl   some rows at intervals: prompt, completion, reward, other numbers, and those of each token.
                    `held_out` is true for those of an evaluation, and `step` is that of its line: a batch's own columns
                    of these names are left out
    logs/           output of each rank's process, MESH-RANK.log: see `engines.remote.logs`
    summary.json    at the end of every run: status, steps, wall_s, tokens, first and last reward,
                    and the share of unknown ones
    """

    def __init__(
        self,
        folder: Path,
        resolved: Mapping[str, object],
        sizes: Mapping[str, int] | None = None,
        check: Callable[[], None] = lambda: None,
        trackers: Trackers | None = None,
    ) -> None:
        """Open a run's folder.

        `sizes`: those of the files at the checkpoint of a resumed run. Empty if a run starts again in the folder of an
        attempt without checkpoints. None for a new folder. `check` raises if the folder belongs to another run.
        `trackers` get the numbers and samples too, once the run owns the folder.
        """
        self._trackers = trackers or Trackers(())
        self._final = folder
        self.folder: Path = start_folder(folder) if sizes is None else folder
        """The present folder of the files."""
        self._check = check
        self.began: float = clock()
        """The start of `seconds`, on the event loop's clock."""
        folder = self.folder
        if sizes is not None:
            cut_files(folder, sizes)
            self._trackers.recall(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._resolved = _without_none(resolved)
        write_whole(folder / "config.toml", tomli_w.dumps(self._resolved).encode())
        self._earlier = 0.0
        """Seconds before the checkpoint."""
        self._steps = 0
        self._tokens = 0.0
        self._rewards: list[float] = []
        self._rows, self._unknown = 0.0, 0.0  # those of all steps, and those of unknown reward
        self._extra: dict[str, object] = {}
        self._is_full = False
        """True if samples.jsonl takes no more tokens."""
        self._first_step = self._recall()
        self._progress: Progress | None = None
        self.newest: Mapping[str, float] = {}
        """The numbers of the newest step."""
        self.shows_progress = True
        """True if a user is watching."""
        self.leaves_failures = True
        """False if the folder is removed if the run fails before its first step, and no rank has a log there."""
        with ExitStack() as opened:  # closed if a later one fails
            self._metrics, self._samples, self._groups = (
                opened.enter_context((folder / name).open("ab")) for name in (METRICS, SAMPLES, GROUPS)
            )
            self._part = opened.enter_context((folder / _PART).open("wb", buffering=0))
            self._part.write(b" " * _RESERVED)
            opened.pop_all()

    def settle(self) -> None:
        """Take over the run's folder, and rename an earlier run's."""
        if self.folder != self._final:
            self._check()
            take_over(self._final, self.folder)
            self.folder = self._final
        self._trackers.begin(self.folder, self._resolved, self._first_step)

    def _stay(self, error: BaseException | None) -> None:
        """Leave the files of a run without steps where they are, if there is something to read."""
        is_empty = not (self._steps or self.leaves_failures or (self.folder / "logs").exists())
        if is_empty and self._is_own(error):
            shutil.rmtree(self.folder)
        elif self.folder != self._final:
            log.warning(
                f"no step was made: {self._final} is the earlier run's, and this one's files are in {self.folder}"
            )
            self._final = self.folder

    def begin(self, count: int, done: int = 0) -> None:
        """Show progress from here on, over `count` steps with `done` of them made."""
        self._end_progress()
        if not self.shows_progress:
            return
        from meshrl.run.progress import Progress  # noqa: PLC0415 -- it imports rich, which ranks do not need

        self._progress = Progress(count, done)

    def step(self, step: int, values: Mapping[str, float], beside: Mapping[str, float] | None = None) -> None:
        """Write a step's numbers. `reward` is the mean reward. `tokens`, if given, is added to the summary's.

        `beside`: numbers for the line of progress alone.
        """
        self._check()
        numbers = self._write_numbers(self._metrics, step, values)
        self._count(numbers)
        self.newest = {**numbers, "step": float(step)}
        if self._progress:
            self._progress.show(numbers, beside or {})

    def account(self, account: StepAccount) -> None:
        """Write what happened to prompts in a step or between two, if anything did."""
        self._check()
        self._write_account(account)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write the results of an evaluation that began after `step` steps."""
        self._check()
        with (self.folder / EVALUATIONS).open("ab") as file:
            self._write_numbers(file, step, values)

    def _write_numbers(self, file: BinaryIO, step: int, values: Mapping[str, float]) -> Mapping[str, float]:
        numbers = {name: float(value) for name, value in values.items()}
        own = {"step": step, "seconds": round(self._seconds, 4)}
        _write_line(file, {**own, **numbers, **own})  # first, and not replaced by a number of this name
        self._trackers.send(lambda tracker: tracker.metrics(step, numbers))
        return numbers

    def samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Write some rows of a batch, as `Samples` returns them. Trackers get texts and rewards of those trained on.

        Rows are kept without their tokens if the file has no more room for them.
        """
        self._check()
        for row in rows:
            line = {"step": step, **row} | {"step": step}
            if "tokens" in line and self._samples.tell() > _MOST:
                del line["tokens"]
                if not self._is_full:
                    log.warning(
                        f"{self.folder / SAMPLES} has {self._samples.tell():,} bytes: from step {step} on, rows are "
                        "kept without their tokens. To have them to the end, raise `run.samples_every` and "
                        "`evaluation.every`, or lower `run.samples_tokens`"
                    )
                self._is_full = True
            _write_line(self._samples, line)
        if shown := shown_in_trackers(rows):
            self._trackers.send(lambda tracker: tracker.samples(step, shown))

    def sizes(self) -> Mapping[str, int]:
        """Return the size in bytes of each growing file, flushed to disk."""
        sizes: dict[str, int] = {}
        for file in (self._metrics, self._samples, self._groups):
            os.fsync(file.fileno())
            sizes[Path(file.name).name] = file.tell()
        if (self.folder / EVALUATIONS).exists():
            with (self.folder / EVALUATIONS).open("ab") as file:
                os.fsync(file.fileno())
                sizes[EVALUATIONS] = file.tell()
        return sizes

    def summary(self, **values: object) -> None:
        """Add values to summary.json: numbers, texts, and lists and tables of them."""
        self._extra |= values

    def close(self, error: BaseException | None, rest: StepAccount | None = None) -> None:
        """Write summary.json atomically. `error`: the error that ended the run, None if it finished.

        `rest`: what happened to prompts since the last account. Raises DataError and writes nothing if the folder
        belongs to another run and no error has said so. Raises OSError if a file could not be completed, such as on a
        full disk. The summary is then written all the same, and reports it.
        """
        self._end_progress()
        with ExitStack() as ends:  # all of them run, even if others raise, the last first
            ends.push(lambda *raised: self._stay(raised[1] if error is None else error))
            ends.callback(self._part.close)
            ends.push(lambda *raised: self._write_summary(raised[1] if error is None else error))
            for file in (self._samples, self._metrics, self._groups):
                ends.callback(file.close)
            if error is None:
                self.settle()
            if rest is not None and self._is_own(error):
                self._write_account(rest)

    def _is_own(self, error: BaseException | None) -> bool:
        """True if the folder is this run's. Raises DataError if it is not and no error has said so."""
        try:
            self._check()
        except DataError:
            if error is None:
                raise
            return False
        return True

    def _write_summary(self, error: BaseException | None) -> None:
        is_interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
        summary: dict[str, object] = {
            "status": "finished" if error is None else "interrupted" if is_interrupted else "failed",
            "steps": self._steps,
            "wall_s": round(self._seconds, 3),
            "tokens": int(self._tokens),
            "first_reward": self._rewards[0] if self._rewards else None,
            "last_reward": self._rewards[-1] if self._rewards else None,
            **({"unknown_rewards": self._unknown / self._rows} if self._unknown else {}),
            **self._extra,
            **({} if error is None else {"error": described(error)}),
        }
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

    @property
    def _seconds(self) -> float:
        return self._earlier + clock() - self.began

    def _recall(self) -> int:
        """Count the steps in the file, and return the number of the next."""
        first_step = 0
        remedy = "Restore the file, or start a run with another name"
        for numbers in read_lines(self.folder / METRICS, dict[str, float | None], remedy=remedy):
            self._count({name: float("nan") if value is None else value for name, value in numbers.items()})
            self._earlier = numbers.get("seconds") or 0.0
            first_step = int(numbers.get("step") or 0) + 1
        return first_step

    def _write_account(self, account: StepAccount) -> None:
        if account.step is not None or account.happened:
            _write_line(self._groups, account)

    def _count(self, numbers: Mapping[str, float]) -> None:
        self._steps += 1
        self._tokens += numbers.get("tokens", 0.0)
        if "reward" in numbers:
            self._rewards.append(numbers["reward"])
        if "unknown_rewards" in numbers and "rows" in numbers:
            self._rows += numbers["rows"]
            self._unknown += numbers["unknown_rewards"] * numbers["rows"]

    def _end_progress(self) -> None:
        if self._progress:
            self._progress.close()
            self._progress = None


def _without_none(value: object) -> dict[str, object]:
    plain = msgspec.to_builtins(value, enc_hook=_plain)

    def without(each: object) -> object:
        if isinstance(each, dict):
            return {key: without(inner) for key, inner in each.items() if inner is not None}
        return [without(inner) for inner in each] if isinstance(each, list | tuple) else each

    return cast("dict[str, object]", without(plain))


def _write_line(file: BinaryIO, record: Mapping[str, object] | StepAccount) -> None:
    file.write(_encode(record) + b"\n")
    file.flush()


def _encode(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return cast("object", value.item())
    return value.tolist() if isinstance(value, np.ndarray) else str(value)
