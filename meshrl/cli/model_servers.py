"""The commands that serve a model through an OpenAI-compatible API: record, serve."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from meshrl.cli.application import (
    WITH_SETTINGS,
    Host,
    Overrides,
    RunArgument,
    Terminated,
    app,
    cancelled_by_sigterm,
    run_async,
    settings,
)
from meshrl.config import Config, Table, apply_overrides, validate
from meshrl.errors import ConfigError
from meshrl.observe import find_run
from meshrl.roles import Sampler, SamplerConfig, Sampling, ServerAddress
from meshrl.run import Run, RunConfig, find_config, load_job, shipped_configs
from meshrl.run import serve as serve_run

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
    host: Host = "127.0.0.1",
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
            run_async(_record(served, address, recording, idle, sessions))
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
        apply_overrides(table, overrides)
        return validate(_Served, table, "command line", overrides)
    job = load_job(find_config(source), overrides)
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


@app.command()
def serve(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", help="Switch to each newer model while the run continues.")
    ] = False,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    python: Annotated[
        str | None, typer.Option(help="Path of the Python that has the server. Default: this Python, not the run's.")
    ] = None,
) -> None:
    """Serve a run's newest model or checkpoint through an OpenAI-compatible API, until Ctrl-C."""
    folder, address = find_run(run).resolve(), ServerAddress(host=host, port=port, python=python, follow=follow)
    try:
        run_async(_serve(folder, address))
    except (KeyboardInterrupt, Terminated):
        typer.echo("The server has ended.", err=True)


async def _serve(folder: Path, address: ServerAddress) -> None:
    with cancelled_by_sigterm():
        await serve_run(folder, address, typer.echo)
