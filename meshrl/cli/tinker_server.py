"""The command that serves models through the Tinker API: tinker."""

from pathlib import Path
from typing import Annotated

import typer

from meshrl.cli.application import WITH_SETTINGS, Overrides, Terminated, app, cancelled_by_sigterm, run_async, settings
from meshrl.config import load_toml, validate
from meshrl.tinker import ServedConfig


@app.command(context_settings=WITH_SETTINGS)
def tinker(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file with [policy], [sampler] and perhaps [tinker], [run].")
    ],
    overrides: Overrides = None,
) -> None:
    """Serve a model through the Tinker API, for programs of its SDK, until Ctrl-C."""
    given, source = settings(config, overrides), Path(config)
    served = validate(ServedConfig, load_toml(source, given), source, given, source.parent)
    try:
        run_async(_serve(served))
    except (KeyboardInterrupt, Terminated):
        typer.echo("The server has ended.", err=True)


async def _serve(served: ServedConfig) -> None:
    from meshrl.tinker import serve  # noqa: PLC0415 -- an extra

    with cancelled_by_sigterm():
        await serve(served, typer.echo)
