"""Run a job to its end, through restarts. `train` makes the job from a model, rows and a reward."""

import gc
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, cast

import msgspec

from meshrl import log
from meshrl.config import Table, leaves
from meshrl.errors import ConfigError, DataError, DataLost, EngineDied, MeshrlError, RankDied, SetAside, described
from meshrl.events import Restart, sink
from meshrl.roles import NewModel
from meshrl.run.check import find_mistakes, list_of_mistakes
from meshrl.run.jobs import Job, find_script, load_script, make_job, pin
from meshrl.run.run import Run
from meshrl.tasks import RewardConfig, RewardFunction, numbered_rows

_SOURCE: Final = Path("settings")
"""The name of the settings in error messages."""


@dataclass(frozen=True)
class Trained:
    """The result of `train`."""

    folder: Path
    """The run's folder."""
    summary: Mapping[str, object]
    """The content of summary.json: numbers of held-out prompts before and after, steps, seconds."""

    @property
    def model(self) -> Path:
        """The trained model: a Hugging Face folder."""
        return self.folder / "model"


async def train(
    model: str | Path | NewModel | Mapping[str, object],
    rows: str | Path | Iterable[Mapping[str, object]],
    reward: RewardFunction | RewardConfig | str | None = None,
    settings: Mapping[str, object] | None = None,
) -> Trained:
    """Train a model with GRPO, or another shipped algorithm, on rows that a reward scores.

        trained = asyncio.run(meshrl.train("models/mine", rows, judge, {"steps": 50, "task.prompt": "{question}"}))

    - `model`: a folder or a name, as in `policy.model`. Or a new model: a `NewModel`, or a mapping with its keys.
    - `rows`: mappings, such as a list of dicts or a `datasets.Dataset`, which are written next to the run's folder as
      JSON lines. Or the name of a source, as in `task.source`: a .jsonl or .parquet file, or `hf:ORG/NAME`.
    - `reward`: a function, its name as in `reward.function`, or a table with several functions. None for an algorithm
      without a reward.
    - `settings`: keys of a configuration file, dotted or in tables, and their values. By default `algorithm` is "grpo",
      `run.name` is "train", and a tenth of the prompts is held out.

    Raises ConfigError with all mistakes in the settings, and the errors of a run.
    """
    if not isinstance(cast("object", model), str | Path | NewModel | Mapping):
        raise ConfigError(
            f"a model is a folder, a name or a NewModel, not {model!r:.80}: save a model that is in memory with its "
            "tokenizer by `save_pretrained(FOLDER)`, and give the folder"
        )
    if not (reward is None or isinstance(reward, str | RewardConfig) or callable(reward)):
        raise ConfigError(
            f"a reward is a function, its name or a RewardConfig, not {reward!r:.80}: several are "
            "RewardConfig(functions={name: function})"
        )
    if not (settings is None or isinstance(cast("object", settings), Mapping)):
        raise ConfigError(f"settings are keys with values, such as {{'steps': 50}}, not {settings!r:.80}")
    named = leaves(settings) if settings else ()
    keys = {(*str(first).split("."), *map(str, below)): value for (first, *below), value in named}
    if isinstance(rows, str | Path):
        job = _make_job(_table(model, str(rows), reward, keys), reward)
        _check(job)
    else:
        text = b"\n".join(_json_line(where, row) for where, row in numbered_rows(rows))
        # Named by their content, so that another call's rows do not overwrite them.
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        source = Path(str(keys.get(("run", "folder"), "runs")), f"rows-{digest}.jsonl")
        job = _make_job(_table(model, str(source), reward, keys), reward)
        _write(source, text, partial(_check, job))
    run = await run_job(pin(job))
    summary = msgspec.json.decode((run.folder / "summary.json").read_bytes(), type=dict[str, object])
    return Trained(run.folder, summary)


def _make_job(table: Table, reward: object) -> Job:
    """Make the job that the tables describe, with a reward that is a function itself."""
    algorithm = str(table["algorithm"])
    has_reward = "reward" in load_script(find_script(algorithm, _SOURCE)).schema.model_fields
    if reward is not None and not has_reward:
        raise ConfigError(f"{algorithm} has no reward: leave {reward!r:.80} out")
    if has_reward and "reward" not in table:
        raise ConfigError(f"{algorithm} needs a reward: give a function (prompt, completion, row) -> float")
    job = make_job(_SOURCE, table, Path())
    if reward is None or isinstance(reward, str):
        return job
    own = cast("RewardConfig", vars(job.config)["reward"]).model_dump(exclude_unset=True)
    given = reward.model_dump(exclude_unset=True) if isinstance(reward, RewardConfig) else {"function": reward}
    judge = RewardConfig.model_validate(own | given)
    config = job.config.model_copy(update={"reward": judge})
    return replace(job, config=config, resolved=job.resolved | {"reward": judge.model_dump(mode="json")})


def _table(
    model: str | Path | NewModel | Mapping[str, object],
    rows: str,
    reward: object,
    settings: Mapping[tuple[str, ...], object],
) -> Table:
    new = model.model_dump() if isinstance(model, NewModel) else model
    arguments: dict[str, object] = {
        "task.source": rows,
        "policy.model": dict(new) if isinstance(new, Mapping) else str(new),
        **({"reward.function": reward} if isinstance(reward, str) else {"reward": {}} if reward else {}),
    }
    taken = {"task.source", "policy.model", *(("reward.function", "reward.functions") if reward else ())}
    if twice := sorted(taken & {".".join(path[:2]) for path in settings}):
        raise ConfigError(f"{_SOURCE}: {twice[0]} is an argument of train: remove it from the settings")
    defaults = {"algorithm": "grpo", "run.name": "train", "task.held_out": "all"}
    keys = {tuple(key.split(".")): value for key, value in (defaults | arguments).items()} | dict(settings)
    whole: Table = {}
    for path, value in keys.items():
        *above, last = path
        table = whole
        for key in above:
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{_SOURCE}: {'.'.join(path)}: {key} is {inner!r} already: give one of the two")
            table = inner
        if not (value == {} and last in table):
            table[last] = value
    return whole


def _check(job: Job) -> None:
    if mistakes := find_mistakes(job.config, job.run):
        raise ConfigError(list_of_mistakes(_SOURCE, mistakes))


def _write(file: Path, text: bytes, check: Callable[[], None]) -> None:
    part, existed = file.with_suffix(f".{os.getpid()}.part"), file.exists()
    made = [folder for folder in file.parents if not folder.exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(text)
    part.replace(file)
    try:
        check()
    except BaseException:
        if not existed:
            file.unlink()
        with suppress(OSError):  # if another run has begun there
            for folder in made:
                folder.rmdir()
        raise


def _json_line(where: str, row: Mapping[str, object]) -> bytes:
    try:
        return msgspec.json.encode(row)
    except ValueError as error:
        raise DataError(f"{where}: cannot be written as JSON: {error}: correct the text") from error


async def run_job(job: Job, begun: Callable[[Run], None] = lambda _: None) -> Run:
    """Run a job's script to its end, and return the ended run.

    While `restarts` are left, a machine's fault does not end the job: the script is called again, with new ranks and
    roles, in a run that resumes from the newest checkpoint. The same after a damaged checkpoint was set aside, without
    the use of a restart. Any other error is raised. `begun` gets each run as it begins.
    """
    config, number, left, fault = job.run, 0, job.run.restarts, ""
    while True:
        run = Run(config, job.resolved)
        try:
            async with run:
                if number:
                    run.waits = config.restart_wait
                    run.summary(restarts=number)
                    if event_log := sink.get():
                        event_log.emit(Restart(event_log.now(), number, fault))
                begun(run)
                await job.script.function(run, job.config)
            return run
        except (MeshrlError, ExceptionGroup) as error:
            number, fault = number + 1, described(error)
            if _consists_of(error, (SetAside,)):
                log.warning("the run is begun again from an earlier checkpoint", error=fault)
            elif left and is_machine_fault(error):
                left -= 1
                log.warning(
                    f"a machine failed: the run is restarted, number {config.restarts - left} of {config.restarts} "
                    "(run.restarts)",
                    error=fault,
                )
            else:
                raise
        if run.recorder.folder == Path(config.folder) / config.name:  # else only an earlier run's could be resumed
            config = config.model_copy(update={"resume": True})
        del run
        gc.collect()  # the error and its frames form a cycle, and hold weights in shared memory


def is_machine_fault(error: BaseException) -> bool:
    """True if a rank's process, its data or its device is lost. A new attempt may not meet the same fault."""
    return _consists_of(error, (RankDied, EngineDied, DataLost, SetAside))


def _consists_of(error: BaseException, kinds: tuple[type[MeshrlError], ...]) -> bool:
    """True if an error, all of a group, or the cause of one of ours, is of these kinds."""
    if isinstance(error, BaseExceptionGroup):
        return all(_consists_of(each, kinds) for each in error.exceptions)
    if isinstance(error, kinds):
        return True
    cause = error.__cause__
    return isinstance(error, MeshrlError) and cause is not None and _consists_of(cause, kinds)
