"""Read what a run has left in its folder: its newest model, its tables, a prompt."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshrl.config import Table, load_toml, validate
from meshrl.engines.local import LocalEngine
from meshrl.errors import ConfigError, MeshrlError, ModelError
from meshrl.mesh import Mesh
from meshrl.observe import table_of
from meshrl.roles import BackendOptions, NewModel, Policy, PolicyConfig, implementation, models_of, with_options
from meshrl.run.checkpoints import newest_checkpoint


class _Source(NamedTuple):
    """A model that a run has written."""

    path: Path
    """A Hugging Face folder, or a checkpoint."""
    at: int
    """Modification time in nanoseconds."""


async def newest_model(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[Path, Path]:
    """Return the run's newest model or checkpoint, and a Hugging Face folder of it, which may be made in `scratch`.

    Adapters are merged into their model. Raises ConfigError if the run has neither, and ModelError if it cannot be
    read.
    """
    source, folder = await newest_source(run, policy, scratch)
    return source.path, folder


async def newest_source(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[_Source, Path]:
    """Return the source and the folder of a run's newest model. Raises ConfigError if it has none."""
    found = await newest_folder(run, policy, scratch)
    if found is None and models_of(policy.backend) == "ignored" and summary_of(run):
        raise ConfigError(
            f"{run} has neither a model nor a checkpoint, though it has ended: its policy was a fake, which writes no "
            "model: run it with a model"
        )
    if found is None:
        raise ConfigError(
            f"{run} has neither a model nor a checkpoint yet: wait for the run's end, or start it with "
            "run.checkpoint_every=50"
        )
    return found


async def merge_adapters(run: Path, folder: Path) -> Path:
    """Write a run's newest adapters, merged into their model, as a Hugging Face folder. Returns what was read.

    Raises ConfigError if the run has no adapters or the folder exists.
    """
    file = run / "config.toml"
    policy = validate(PolicyConfig, table_of(load_toml(file), "policy"), file)
    if policy.lora is None:
        raise ConfigError(f"{run} has trained no adapters: its whole model is in {run / 'model'}")
    _check_free(folder)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=run) as scratch:
        source, whole = await newest_source(run, policy, Path(scratch))
        if whole == source.path:
            raise ConfigError(f"{whole} is a whole model without adapters to merge")
        shutil.move(whole, folder)
    return source.path


def _check_free(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another place with --out, or remove it")


def summary_of(run: Path) -> Table:
    """Return the content of summary.json. Empty if the run has not ended."""
    try:
        return msgspec.json.decode((run / "summary.json").read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError):
        return {}


def sample_prompt(run: Path, model: str | NewModel) -> str:
    """Return a prompt of the run's samples, or without samples one that the model can read."""
    try:
        with (run / "samples.jsonl").open("rb") as samples:
            line = msgspec.json.decode(next(samples, b"{}"), type=dict[str, object])
    except (OSError, ValueError, msgspec.DecodeError):
        line = {}
    return str(line.get("prompt", model.characters[0] if isinstance(model, NewModel) else "Hello"))


def newest(run: Path) -> _Source | None:
    """Return the newest model or checkpoint. None if there is none."""
    checkpoint, model = newest_checkpoint(run), run / "model"
    files = [model / "config.json", model / "adapter_config.json", *([checkpoint / "run.json"] if checkpoint else [])]
    found: list[_Source] = []
    for file in files:
        with suppress(FileNotFoundError):
            if file.is_file():
                found.append(_Source(file.parent, file.parent.stat().st_mtime_ns))
    return max(found, key=lambda source: source.at, default=None)


async def newest_folder(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[_Source, Path] | None:
    """Return the newest model and a Hugging Face folder of it. None if there is none."""
    while (source := newest(run)) is not None:
        try:
            folder = await _whole(policy, source.path, scratch)
        except (MeshrlError, OSError):
            if source.path.is_dir():
                raise
            continue  # a newer one has replaced it
        return source, folder
    return None


async def _whole(policy: PolicyConfig, source: Path, scratch: Path) -> Path:
    """Return a Hugging Face folder of a model or checkpoint, with adapters merged into their model."""
    folder = source if source.name == "model" else await _saved(policy, scratch / "model", _state(source))
    if not (folder / "adapter_config.json").is_file():
        return folder
    return await _saved(policy.model_copy(update={"model": str(folder), "lora": None}), scratch / "merged")


async def _saved(policy: PolicyConfig, folder: Path, state: Path | None = None) -> Path:
    """Save a policy into the folder, after restoring its state if there is one, and return the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    engine = LocalEngine()
    try:
        mesh = await Mesh.reserve(engine, 1)
        # A single rank can read what any number of ranks has written.
        alone = with_options(policy, *(type(value)() for _, value in policy if isinstance(value, BackendOptions)))
        actor = await mesh.spawn(implementation(Policy, policy.backend), alone)
        if state is not None:
            await actor.restore(str(state))
        await actor.save(str(folder))
    finally:
        await engine.close()
    return folder


def _state(checkpoint: Path) -> Path:
    """Return the folder of the first policy's state."""
    states = list(checkpoint.glob("*-policy"))
    if not states:
        raise ModelError(f"{checkpoint} has no policy to serve")
    return min(states, key=lambda state: int(state.name.split("-")[0]))
