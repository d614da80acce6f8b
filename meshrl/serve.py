"""Serving what a run has trained: its newest model is given to a server, and with `follow` each newer one."""

import asyncio
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
from pydantic import Field

from meshrl.checkpoints import newest_checkpoint
from meshrl.config import Config, Table, load_toml, validate
from meshrl.engines.local import LocalEngine
from meshrl.errors import ConfigError, MeshrlError, ModelError
from meshrl.layout import FsdpConfig, MegatronConfig, VllmConfig
from meshrl.mesh import Mesh
from meshrl.registry import implementation
from meshrl.role_config import NewModel, PolicyConfig, RoleConfig
from meshrl.roles import Policy

_LOOKS: Final = 1.0
"""Seconds between two looks at the run's folder."""


class Address(Config):
    """Where a server is to be, and how it runs; what a user says."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, gt=0, lt=65536)
    python: str | None = None
    """The interpreter of an environment that has the server; nothing means the run's `sampler.vllm.python`."""
    follow: bool = False
    """Take each newer model of the run."""

    @property
    def url(self) -> str:
        """As a shell or a browser takes it."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class ServerConfig(RoleConfig, Address):
    """What a server is told."""

    backend: str = "vllm"
    model: str
    """A Hugging Face folder, absolute."""
    name: str
    """What those who ask call the model."""
    dtype: Literal["float32", "bfloat16"]
    prompt: str
    """For an example."""
    chat: bool
    """Whether a prompt is a user's message."""
    max_tokens: int
    kv_cache_mib: int | None
    """Memory for keys and values; nothing leaves it to the server."""


class Server(ABC):
    """A process that answers requests over HTTP. The constructor takes a ServerConfig and starts it."""

    @abstractmethod
    async def started(self) -> str:
        """Wait until it answers; a line for the shell that asks it something."""

    @abstractmethod
    def check(self) -> None:
        """Raise where it has ended."""

    @abstractmethod
    async def load(self, folder: str, version: str) -> None:
        """Take the weights of an absolute Hugging Face folder; what is being decoded goes on with them."""

    @abstractmethod
    def close(self) -> None:
        """End it."""


class _Source(NamedTuple):
    """A model that a run has written."""

    path: Path
    """A Hugging Face folder, or a checkpoint."""
    at: int
    """When, in nanoseconds."""


async def serve(run: Path, address: Address, say: Callable[[str], None]) -> None:
    """Serve the newest model of a run, whose folder is absolute, until this is cancelled.

    ConfigError where the run has none, and what its policy and the server raise.
    """
    table = load_toml(run / "config.toml")
    policy = validate(PolicyConfig, table_of(table, "policy"), run / "config.toml")
    with tempfile.TemporaryDirectory(prefix="meshrl-serve-") as scratch:
        source, folder = await _newest_source(run, policy, Path(scratch))
        config = _server_config(run, table, policy, folder, address)
        server = implementation(Server, config.backend)(config)
        try:
            say(f"{source.path} is loaded")
            say(f"{address.url} answers: try\n{await server.started()}")
            while True:
                await asyncio.sleep(_LOOKS)
                server.check()
                if not address.follow or _newest(run) == source:
                    continue
                if found := await _newest_folder(run, policy, Path(scratch)):
                    source, folder = found
                    await server.load(str(folder), source.path.name)
                    say(f"{source.path} is served")
        finally:
            server.close()


async def newest_model(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[Path, Path]:
    """What a run wrote last, its model or a checkpoint, and a Hugging Face folder of it, perhaps made in `scratch`.

    ConfigError where there is neither; ModelError where it is no whole model.
    """
    source, folder = await _newest_source(run, policy, scratch)
    return source.path, folder


async def _newest_source(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[_Source, Path]:
    found = await _newest_folder(run, policy, scratch)
    if found is None:
        raise ConfigError(
            f"{run} has neither a model nor a checkpoint yet: wait for the run's end, or start it with "
            "run.checkpoint_every=50"
        )
    return found


def _server_config(run: Path, table: Table, policy: PolicyConfig, folder: Path, address: Address) -> ServerConfig:
    sampler = table_of(table, "sampler")
    vllm = validate(VllmConfig, table_of(sampler, "vllm"), run / "config.toml")
    most = table_of(table, "sampling").get("max_tokens")
    return ServerConfig(
        **address.model_dump(exclude={"python"}),
        python=address.python or vllm.python,
        kv_cache_mib=vllm.kv_cache_mib,
        model=str(folder),
        name=run.name,
        dtype=policy.dtype,
        prompt=_prompt(run, policy.model),
        chat=bool(sampler.get("chat", policy.chat)),
        max_tokens=most if isinstance(most, int) else 16,
    )


def table_of(table: Mapping[str, object], name: str) -> Table:
    """A table in a table; an empty one where it is not there."""
    found = table.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def _prompt(run: Path, model: str | NewModel) -> str:
    """One that the run was trained on, where it has kept some; else one that the model can read."""
    try:
        with (run / "samples.jsonl").open("rb") as samples:
            line = msgspec.json.decode(next(samples, b"{}"), type=dict[str, object])
    except (OSError, msgspec.DecodeError):
        line = {}
    return str(line.get("prompt", model.characters[0] if isinstance(model, NewModel) else "Hello"))


def _newest(run: Path) -> _Source | None:
    """What it wrote last; None where nothing is there."""
    checkpoint, model = newest_checkpoint(run), run / "model"
    files = [model / "config.json", model / "adapter_config.json", *([checkpoint / "run.json"] if checkpoint else [])]
    found: list[_Source] = []
    for file in files:
        with suppress(FileNotFoundError):
            if file.is_file():
                found.append(_Source(file.parent, file.parent.stat().st_mtime_ns))
    return max(found, key=lambda source: source.at, default=None)


async def _newest_folder(run: Path, policy: PolicyConfig, scratch: Path) -> tuple[_Source, Path] | None:
    """The newest model, and a Hugging Face folder of it; None where there is none."""
    while (source := _newest(run)) is not None:
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
        alone = policy.model_copy(update={"fsdp": FsdpConfig(), "megatron": MegatronConfig()})
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
