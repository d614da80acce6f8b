"""Fork a run: repeat it up to a step, and continue with other settings."""

import json
import secrets
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from meshrl import log
from meshrl.config import Table
from meshrl.errors import ConfigError, DataError
from meshrl.observe import table_of
from meshrl.run.audit import steps_made
from meshrl.run.checkpoints import checkpoint_until, newest_checkpoint, redeal_prompts, steps_of
from meshrl.run.folder import GROWING, read_configuration, write_whole

LINEAGE: Final = "fork.json"
_OWN: Final = ("run", "run.name", "run.folder", "run.resume", "run.deterministic", "run.replay")
"""Settings that a fork sets itself."""


@dataclass(frozen=True)
class Fork:
    """A fork: the earlier run, the step, and the new run."""

    earlier: Path
    """The folder of the earlier run."""
    step: int
    """Number of steps that both runs have in common."""
    checkpoint: Path | None
    """The checkpoint from which the earlier steps are repeated. None: from the beginning."""
    folder: Path
    """The folder of the new run."""
    alike: Sequence[str]
    """Overrides that repeat the earlier run's steps in the new folder."""
    onward: Sequence[str]
    """Overrides with which the new run continues."""
    seed: str | None
    """The new run's seed, if it differs."""

    @property
    def has_all(self) -> bool:
        """True if the checkpoint is of exactly that step, so that no step is repeated."""
        return self.checkpoint is not None and steps_of(self.checkpoint) == self.step

    def begin(self) -> None:
        """Copy the checkpoint and the earlier run's recorded numbers into the new folder.

        Raises DataError if the earlier run has removed the checkpoint by now, or if the new folder exists.
        """
        if self.checkpoint is None:
            return
        part = self.folder.with_name(f".{self.folder.name}.fork-{secrets.token_hex(4)}")
        try:
            shutil.copytree(self.checkpoint, part / self.checkpoint.relative_to(self.earlier.resolve()))
            for name in GROWING:
                if (self.earlier / name).exists():
                    shutil.copyfile(self.earlier / name, part / name)
            part.rename(self.folder)
        except OSError as error:
            raise self._not_begun(error) from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _not_begun(self, error: OSError) -> DataError:
        if self.folder.exists():
            return DataError(f"{self.folder} exists by now: give the new run another name with --name")
        if self.checkpoint and not self.checkpoint.exists():
            return DataError(
                f"{self.checkpoint} was removed while it was copied, because {self.earlier} continues: fork again "
                "from a checkpoint that is left, or keep more with run.checkpoints_kept"
            )
        return DataError(f"{self.checkpoint} cannot be copied to {self.folder}: {error}")

    def reseed(self) -> None:
        """If the seed differs, deal prompts in the new seed's order after the common steps."""
        newest = newest_checkpoint(self.folder)
        if self.seed is not None and newest is not None:
            redeal_prompts(newest)

    def note(self, overrides: Sequence[str]) -> None:
        """Write the fork's origin and changed settings into the new folder."""
        origin = {"run": str(self.earlier.resolve()), "step": self.step, "changed": list(overrides)}
        write_whole(self.folder / LINEAGE, msgspec.json.format(msgspec.json.encode(origin), indent=2) + b"\n")


def plan_fork(earlier: Path, step: int, name: str | None, overrides: Sequence[str]) -> Fork:
    """Plan a fork of an earlier run after `step` steps.

    The new folder is next to the run's. Raises ConfigError if the run has made fewer steps, has no `steps`, or replays
    a schedule. Also if the new folder exists, its name is a path, or the overrides contain settings of the fork itself.
    """
    for override in overrides:
        if (key := _split_override(override)[0]) in _OWN:
            raise ConfigError(f"{override}: {key} is set by the fork itself. Name the new run with --name")
    try:
        table = read_configuration(earlier)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{earlier / 'config.toml'} cannot be read, and a fork needs it: {error}") from None
    run = table_of(table, "run")
    total = table.get("steps")
    if not isinstance(total, int):
        raise ConfigError(f"{earlier / 'config.toml'} has no `steps`, which a fork needs to count a run's steps")
    if step > total:
        raise ConfigError(f"--step {step}: {earlier} has steps = {total}, so fork at a step from 1 to {total}")
    if step > (made := steps_made(earlier)):
        then = f"fork at a step from 1 to {made}" if made else "wait for its first step"
        raise ConfigError(f"--step {step}: {earlier} has made {made} of its {total} steps, so {then}")
    folder = _folder_beside(earlier.resolve(), step, name)
    if run.get("replay"):
        raise ConfigError(f"{earlier} repeats the schedule of {run['replay']}: fork that run")
    checkpoint = checkpoint_until(earlier, step)
    begins = steps_of(checkpoint) if checkpoint else 0
    if table.get("ahead") and begins < step:
        log.warning(
            f"ahead = {table['ahead']}: steps {begins} to {step - 1} are repeated, and may give other results, "
            "because rollouts and training overlap differently. With ahead = 0 the results are the same bit by bit"
        )
    seed = next((value for key, value in map(_split_override, overrides) if key == "run.seed"), None)
    if seed == str(run.get("seed", 0)):
        seed = None
    own = [
        f"run.name={json.dumps(folder.name, ensure_ascii=False)}",
        f"run.folder={json.dumps(str(folder.parent), ensure_ascii=False)}",
        "run.deterministic=false",
    ]
    every = [] if run.get("checkpoint_every") else [f"run.checkpoint_every={step}"]
    return Fork(
        earlier,
        step,
        checkpoint,
        folder,
        [*own, *every, f"steps={step}", f"run.resume={'true' if checkpoint else 'false'}"],
        [*own, "run.resume=true", *every, *(_seeds(table, seed, overrides) if seed else ()), *overrides],
        seed,
    )


def _folder_beside(earlier: Path, step: int, name: str | None) -> Path:
    """Return the fork's folder. Raises ConfigError if it exists or its name is a path."""
    if name is not None and (name in {"", ".."} or Path(name).name != name):
        raise ConfigError(f"--name {name!r}: a fork is next to its earlier run: write a name, such as --name slower")
    folder = earlier.with_name(name or f"{earlier.name}-at-{step}")
    if not folder.exists():
        return folder
    if (folder / LINEAGE).exists():
        do = f"to continue this fork: meshrl run {shlex.quote(str(folder / 'config.toml'))}. For another one, give"
    else:
        do = f"if a fork was interrupted there before step {step}, remove it and fork again. Otherwise give"
    raise ConfigError(f"{folder} exists already: {do} the new run another name with --name")


def _split_override(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return ".".join(part.strip() for part in key.split(".")), value.strip()


def _seeds(table: Table, seed: str, overrides: Sequence[str]) -> Sequence[str]:
    """Return overrides that give a seed to the roles that used the run's. Seeds in `overrides` take precedence."""
    given = {key for key, _ in map(_split_override, overrides)}
    before = table_of(table, "run").get("seed", 0)
    roles = [key for key in table if "backend" in (role := table_of(table, key)) and role.get("seed") == before]
    return [f"{role}.seed={seed}" for role in roles if f"{role}.seed" not in given]
