"""What a run has trained: its newest model, merged, served or uploaded to the hub."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec
import tomli_w

from meshrl import log
from meshrl.config import Table, load_toml, validate
from meshrl.engines.local import LocalEngine
from meshrl.errors import BackendError, ConfigError, MeshrlError, ModelError
from meshrl.hub import Repository, create
from meshrl.mesh import Mesh
from meshrl.observe import table_of
from meshrl.roles import (
    BackendOptions,
    NewModel,
    Policy,
    PolicyConfig,
    Server,
    ServerAddress,
    ServerConfig,
    backends_with,
    implementation,
    models_of,
    with_options,
)
from meshrl.run.checkpoints import newest_checkpoint
from meshrl.run.folder import read_json

_POLL_SECONDS: Final = 1.0
"""Seconds between two checks of a run's folder for a newer model."""
_MEASURES: Final = ("reward", "reward_sampled", "exact_match", "exact_match_sampled")


class _Source(NamedTuple):
    """A model that a run has written."""

    path: Path
    """A Hugging Face folder, or a checkpoint."""
    at: int
    """Modification time in nanoseconds."""


def read_policy(run: Path) -> tuple[Table, PolicyConfig]:
    """Return a run's configuration, and the policy's part of it."""
    file = run / "config.toml"
    table = load_toml(file)
    return table, validate(PolicyConfig, table_of(table, "policy"), file)


async def newest_model(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[_Source, Path]:
    """Return the run's newest model or checkpoint, and a Hugging Face folder of it, which may be made in `scratch`.

    Adapters are merged into their model. Raises ConfigError if the run has neither, and ModelError if it cannot be
    read.
    """
    found = await _newest_folder(run, policy, scratch)
    if found is None and models_of(policy.backend) == "ignored" and read_json(run / "summary.json"):
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
    _, policy = read_policy(run)
    if policy.lora is None:
        named = ", ".join(policy.adapters or ())
        raise ConfigError(
            f"{run} has trained {f'the adapters {named}, of which none is `lora`' if named else 'no adapters'}: its "
            f"model is in {run / 'model'}"
        )
    _check_free(folder)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=run) as scratch:
        source, whole = await newest_model(run, policy, Path(scratch))
        if whole == source.path:
            raise ConfigError(f"{whole} is a whole model without adapters to merge")
        shutil.move(whole, folder)
    return source.path


def _check_free(folder: Path) -> None:
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another place with --out, or remove it")


def _newest(run: Path) -> _Source | None:
    """Return the newest model or checkpoint. None if there is none."""
    checkpoint, model = newest_checkpoint(run), run / "model"
    files = [model / "config.json", model / "adapter_config.json", *([checkpoint / "run.json"] if checkpoint else [])]
    found: list[_Source] = []
    for file in files:
        with suppress(FileNotFoundError):
            if file.is_file():
                found.append(_Source(file.parent, file.parent.stat().st_mtime_ns))
    return max(found, key=lambda source: source.at, default=None)


async def _newest_folder(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[_Source, Path] | None:
    """Return the newest model and a Hugging Face folder of it. None if there is none."""
    while (source := _newest(run)) is not None:
        try:
            return source, await _model_folder(policy, source.path, scratch)
        except (MeshrlError, OSError):
            if source.path.is_dir():
                raise  # else a newer one has replaced it
    return None


async def _model_folder(policy: PolicyConfig, source: Path, scratch: Path) -> Path:
    """Return a Hugging Face folder of a model or checkpoint, with adapters merged into their model."""
    folder = source if source.name == "model" else await _saved(policy, scratch / "model", _first_policy(source))
    if not (folder / "adapter_config.json").is_file():
        return folder
    return await _saved(
        policy.model_copy(update={"model": str(folder), "lora": None, "adapters": None}), scratch / "merged"
    )


def _first_policy(checkpoint: Path) -> Path:
    """Return the folder of the first policy's state."""
    states = list(checkpoint.glob("*-policy"))
    if not states:
        raise ModelError(f"{checkpoint} has no policy to serve")
    return min(states, key=lambda state: int(state.name.split("-")[0]))


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


async def serve(run: Path, address: ServerAddress, say: Callable[[str], None]) -> None:
    """Serve the newest model of a run, whose folder is absolute, until this is cancelled.

    With `follow`, each newer model is loaded. Raises ConfigError if the run has no model, and the errors of its policy
    and the server.
    """
    table, policy = read_policy(run)
    with tempfile.TemporaryDirectory(prefix="meshrl-serve-") as scratch:
        source, folder = await newest_model(run, policy, Path(scratch))
        config, python = _server_config(run, table, policy, folder, address)
        # A run's folder is data that anybody may have made: its interpreter runs only if the user names it.
        unused = f"{run / 'config.toml'} names the interpreter {python}, which is not run without --python {python}"
        other = python is not None and address.python is None
        if other:
            log.info(f"the server runs in this environment: {unused}")
        server = implementation(Server, config.backend)(config)
        try:
            say(f"{source.path} is loaded")
            try:
                say(f"{address.url} answers: try\n{await server.started()}")
            except ModelError as error:
                raise (ModelError(f"{error}\n{unused}") if other else error) from error.__cause__
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                server.check()
                if not address.follow or _newest(run) == source:
                    continue
                if found := await _newest_folder(run, policy, Path(scratch)):
                    source, folder = found
                    await server.load(str(folder), source.path.name)
                    say(f"{source.path} is served")
        finally:
            server.close()


def _server_config(
    run: Path, table: Table, policy: PolicyConfig, folder: Path, address: ServerAddress
) -> tuple[ServerConfig, object]:
    """Return the server's configuration, and the interpreter of the run's sampler."""
    sampler = table_of(table, "sampler")
    most = table_of(table, "sampling").get("max_tokens")
    if not (able := backends_with("Server")):
        raise BackendError("no installed backend can serve a model: install one with the role Server")
    backend = str(sampler.get("backend"))
    if backend not in able:
        backend = able[0]
    config = {
        **address.model_dump(),
        "backend": backend,
        "model": str(folder),
        "name": run.name,
        "dtype": policy.dtype,
        "prompt": _sample_prompt(run, policy.model),
        "chat": bool(sampler.get("chat", policy.chat)),
        "chat_template_kwargs": sampler.get("chat_template_kwargs", policy.chat_template_kwargs),
        "max_tokens": most if isinstance(most, int) else 16,
    }
    # A server runs like its backend's sampler, except for the interpreter.
    own = table_of(sampler, backend)
    python = own.pop("python", None)
    return validate(ServerConfig, config | ({backend: own} if own else {}), run / "config.toml"), python


def _sample_prompt(run: Path, model: str | NewModel) -> str:
    """Return a prompt of the run's samples, or without samples one that the model can read."""
    try:
        with (run / "samples.jsonl").open("rb") as samples:
            line = msgspec.json.decode(next(samples, b"{}"), type=dict[str, object])
    except (OSError, ValueError, msgspec.DecodeError):
        line = {}
    return str(line.get("prompt", model.characters[0] if isinstance(model, NewModel) else "Hello"))


async def push(run: Path, name: str, *, public: bool = False) -> str:
    """Upload a run's newest model to the repository `ORG/NAME`, private unless `public`. Returns its address.

    Adapters are merged into their model. Raises ConfigError if the run has no model, and ModelError if the hub refuses
    it.
    """
    table, policy = read_policy(run)
    if (found := Repository.of(name)) is None or found.revision:
        raise ConfigError(f"{name!r} is not a name on the hub: write ORG/NAME")
    with tempfile.TemporaryDirectory(prefix="meshrl-push-") as scratch:
        source, folder = await newest_model(run, policy, Path(scratch))
        staged = Path(scratch, "staged")
        shutil.copytree(folder, staged, copy_function=os.symlink)
        (staged / "README.md").write_text(_card(name, table, read_json(run / "summary.json")), "utf-8")
        return create(
            name, staged, public=public, message=f"{run.name}/{source.path.name}, by meshrl {version('meshrl')}"
        )


def _card(name: str, table: Table, summary: Mapping[str, object]) -> str:
    """The text of README.md: front matter for the hub, then a description."""
    algorithm, base = Path(str(table["algorithm"])).stem, table_of(table, "policy").get("model")
    source = str(table_of(table, "task").get("source", ""))
    judged = table_of(table, "reward").get("function")
    begun = Repository.of(base) if isinstance(base, str) else None
    head = ["pipeline_tag: text-generation", f"tags: [meshrl, {algorithm}]"]
    head += [f"base_model: {begun.name}"] if begun else []
    head += [f"datasets: [{source.removeprefix('hf:').partition('@')[0]}]"] if source.startswith("hf:") else []
    sentence = [f"Trained from {f'`{_plain(base)}`' if isinstance(base, str) else 'a new, small model'}"]
    sentence += [f"by `{algorithm}` with meshrl {version('meshrl')}"]
    sentence += [f"on `{_plain(source)}`"] if source else []
    sentence += [f"for the reward `{_plain(judged)}`"] if judged else []
    sentence += [f"in {summary['steps']} steps"] if "steps" in summary else []
    settings = tomli_w.dumps({key: _shown(value) for key, value in table.items() if key != "run"}).strip()
    return "\n".join(
        [
            *("---", *head, "---", "", f"# {name.partition('/')[2]}", "", f"{' '.join(sentence)}.", ""),
            *_measures(summary),
            *("`meshrl run` of this configuration made it:", "", "```toml", settings, "```", ""),
        ]
    )


def _measures(summary: Mapping[str, object]) -> list[str]:
    found = [each for each in _MEASURES if f"{each}_before" in summary and f"{each}_after" in summary]
    if not found:
        return []
    rows = [f"| {each} | {summary[f'{each}_before']:.3f} | {summary[f'{each}_after']:.3f} |" for each in found]
    return ["On prompts that were held out:", "", "| measure | before | after |", "|---|---|---|", *rows, ""]


def _shown(value: object) -> object:
    """Remove folders of this machine from a value."""
    if isinstance(value, Mapping):
        return {key: _shown(each) for key, each in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list):
        return [_shown(each) for each in cast("list[object]", value)]
    return _plain(value) if isinstance(value, str) else value


def _plain(text: object) -> str:
    """Reduce a path to its name."""
    path, colon, rest = str(text).partition(":")
    return f"{Path(path).name}{colon}{rest}" if Path(path).is_absolute() else str(text)
