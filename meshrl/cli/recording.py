"""The command that records what programs say to a model: record."""

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from meshrl.cli.application import WITH_SETTINGS, Overrides, app, settings
from meshrl.cli.signals import Terminated, cancelled_by_sigterm
from meshrl.config import Config, Table, put_over, validate
from meshrl.engines.local import RankLoop
from meshrl.errors import ConfigError
from meshrl.roles import Sampler, SamplerConfig, Sampling
from meshrl.run import Run, RunConfig, find_config, load_job, shipped_configs

if TYPE_CHECKING:
    from meshrl.agents import GatewayConfig, Recording

_LONG: Final = 2048
"""Tokens of an answer at most, if no configuration says otherwise."""


class _Served(Config):
    """The part of a configuration that is needed."""

    sampler: SamplerConfig
    sampling: Sampling = Sampling(max_tokens=_LONG)
    run: RunConfig = RunConfig()


@app.command(context_settings=WITH_SETTINGS)
def record(
    source: Annotated[
        str,
        typer.Argument(metavar="CONFIG_OR_MODEL", help="A configuration, a model's folder, or ORG/NAME on the hub."),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Rows are appended to FOLDER/rows.jsonl.")
    ] = Path("recorded"),
    host: Annotated[
        str, typer.Option(help="Address to listen on: 127.0.0.1 for this machine only, 0.0.0.0 for every network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 chooses a free one.")] = 8000,
    idle: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="A conversation ends after this time without a request.")
    ] = 300.0,
    sessions: Annotated[int, typer.Option(min=1, help="Base URLs, each with its own key.")] = 1,
) -> None:
    """Serve a model through an OpenAI-compatible API, and record conversations as rows, until Ctrl-C."""
    from meshrl.agents import GatewayConfig, Recording, read_chat  # noqa: PLC0415 -- an extra

    served, address = _served(source, settings(source, overrides)), GatewayConfig(host=host, port=port)
    with Recording(out / "rows.jsonl", read_chat(served.sampler)) as recording:
        try:
            with asyncio.Runner(loop_factory=RankLoop) as runner:
                runner.run(_record(served, address, recording, idle, sessions))
        except (KeyboardInterrupt, Terminated):
            typer.echo(f"{recording.rows} rows were added to {recording.file}", err=True)


async def _record(
    served: _Served, address: "GatewayConfig", recording: "Recording", idle: float, sessions: int
) -> None:
    from meshrl.agents import Gateway  # noqa: PLC0415 -- an extra
    from meshrl.agents import record as record_with  # noqa: PLC0415

    with cancelled_by_sigterm(), tempfile.TemporaryDirectory(prefix="meshrl-record-") as scratch:
        here = {"name": "record", "folder": scratch, "log": [], "deterministic": False, "replay": None}
        alone = {"checkpoint_every": None, "resume": False, "restarts": 0}
        async with Run(served.run.model_copy(update=here | alone)) as run:
            sampler = await run.spawn(Sampler, served.sampler)
            async with Gateway(sampler, recording.chat, address).serving() as gateway:
                await record_with(gateway, served.sampling, recording, idle, typer.echo, sessions)


def _served(source: str, overrides: list[str]) -> _Served:
    """Return what to serve. ConfigError if it is neither a configuration with a sampler nor a model."""
    if _is_model(source):
        table: Table = {"sampler": {"model": source}}
        put_over(table, overrides)
        return validate(_Served, table, "command line", overrides)
    job = load_job(find_config(source), overrides, RunConfig)
    sampler, sampling = (getattr(job.config, name, None) for name in ("sampler", "sampling"))
    if not isinstance(sampler, SamplerConfig):
        raise ConfigError(f"{job.source}: {job.script.path.name} has no sampler, so there is no model to serve")
    return _Served(sampler=sampler, sampling=sampling if isinstance(sampling, Sampling) else Sampling(), run=job.run)


def _is_model(source: str) -> bool:
    """True for a model: a folder with one, a .gguf file, or ORG/NAME on the hub if ORG is not an algorithm."""
    path = Path(source)
    if path.exists() or path.suffix in (".toml", ".gguf"):
        return path.suffix == ".gguf" or (path / "config.json").is_file()
    owner, slash, name = source.partition("/")
    return bool(slash) and "/" not in name and owner not in {each.partition("/")[0] for each in shipped_configs()}
