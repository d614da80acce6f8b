"""What a run has left in its folder: its newest model, its tables, a prompt."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshrl.config import Table
from meshrl.engines.local import LocalEngine
from meshrl.errors import ConfigError, MeshrlError, ModelError
from meshrl.mesh import Mesh
from meshrl.roles import BackendOptions, NewModel, Policy, PolicyConfig, implementation, with_options
from meshrl.run.checkpoints import newest_checkpoint


class _Source(NamedTuple):
    """A model that a run has written."""

    path: Path
    """A Hugging Face folder, or a checkpoint."""
    at: int
    """When, in nanoseconds."""


async def newest_model(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[Path, Path]:
    """What a run wrote last, its model or a checkpoint, and a Hugging Face folder of it, perhaps made in `scratch`.

    ConfigError where there is neither; ModelError where it is no whole model.
    """
    source, folder = await newest_source(run, policy, scratch)
    return source.path, folder


async def newest_source(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[_Source, Path]:
    """Where a run's newest model is from, and its folder; ConfigError where it has none."""
    found = await newest_folder(run, policy, scratch)
    if found is None:
        raise ConfigError(
            f"{run} has neither a model nor a checkpoint yet: wait for the run's end, or start it with "
            "run.checkpoint_every=50"
        )
    return found


def table_of(table: Mapping[str, object], name: str) -> Table:
    """A table in a table; an empty one where it is not there."""
    found = table.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def sample_prompt(run: Path, model: str | NewModel) -> str:
    """One that the run was trained on, where it has kept some; else one that the model can read."""
    try:
        with (run / "samples.jsonl").open("rb") as samples:
            line = msgspec.json.decode(next(samples, b"{}"), type=dict[str, object])
    except (OSError, ValueError, msgspec.DecodeError):
        line = {}
    return str(line.get("prompt", model.characters[0] if isinstance(model, NewModel) else "Hello"))


def newest(run: Path) -> _Source | None:
    """What it wrote last; None where nothing is there."""
    checkpoint, model = newest_checkpoint(run), run / "model"
    files = [model / "config.json", model / "adapter_config.json", *([checkpoint / "run.json"] if checkpoint else [])]
    found: list[_Source] = []
    for file in files:
        with suppress(FileNotFoundError):
            if file.is_file():
                found.append(_Source(file.parent, file.parent.stat().st_mtime_ns))
    return max(found, key=lambda source: source.at, default=None)


async def newest_folder(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[_Source, Path] | None:
    """The newest model, and a Hugging Face folder of it; None where there is none."""
    while (source := newest(run)) is not None:
        try:
            folder = source.path if source.path.name == "model" else await _written(policy, source.path, scratch)
        except (MeshrlError, OSError):
            if source.path.is_dir():
                raise
            continue  # a newer one has taken its place
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{source.path} holds adapters alone, or nothing that Hugging Face knows, and a whole model is "
                "served: merge adapters into their model, or give both to `vllm serve --lora-modules`"
            )
        return source, folder
    return None


async def _written(policy: PolicyConfig, checkpoint: Path, scratch: Path) -> Path:
    """A Hugging Face folder of the first policy in a checkpoint."""
    state = _state(checkpoint)
    folder = scratch / "model"
    if folder.exists():
        shutil.rmtree(folder)
    engine = LocalEngine()
    try:
        mesh = await Mesh.reserve(engine, 1)
        # One rank reads what any number of them has written.
        alone = with_options(policy, *(type(value)() for _, value in policy if isinstance(value, BackendOptions)))
        actor = await mesh.spawn(implementation(Policy, policy.backend), alone)
        await actor.restore(str(state))
        await actor.save(str(folder))
    finally:
        await engine.close()
    return folder


def _state(checkpoint: Path) -> Path:
    """Where the first policy's state is."""
    states = list(checkpoint.glob("*-policy"))
    if not states:
        raise ModelError(f"{checkpoint} holds no policy: there is nothing to serve")
    return min(states, key=lambda state: int(state.name.split("-")[0]))
