"""The commands of servers of the Tinker API: tinker, replay."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from meshrl.cli.application import (
    WITH_SETTINGS,
    Overrides,
    Terminated,
    app,
    cancelled_by_sigterm,
    run_async,
    settings,
    show_error,
)
from meshrl.config import load_toml, validate
from meshrl.errors import MeshrlError
from meshrl.tinker import ServedConfig

if TYPE_CHECKING:
    from meshrl.tinker import Replayed

_DIFFERENCES: Final = 10
"""Differences to show for each model."""


@app.command(context_settings=WITH_SETTINGS)
def tinker(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A TOML file with [policy], [sampler] and perhaps [tinker], [run].")
    ],
    overrides: Overrides = None,
) -> None:
    """Serve a model through the Tinker API, for programs of its SDK, until Ctrl-C."""
    served = _configured(config, overrides)
    try:
        run_async(_serve(served))
    except (KeyboardInterrupt, Terminated):
        typer.echo("The server has ended.", err=True)


@app.command(context_settings=WITH_SETTINGS)
def replay(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The configuration of a server that has ended.")],
    overrides: Overrides = None,
) -> None:
    """Apply the requests again that a Tinker server with `tinker.record` kept, and compare all results bit for bit.

    Exit status: 0 if all are the same, 1 if one differs, 2 if the journals cannot tell.
    """
    try:
        found = run_async(_replay(_configured(config, overrides)))
    except MeshrlError as error:
        show_error(error)
        raise typer.Exit(2) from None
    for each in found:
        typer.echo(f"{'same  ' if not each.differences else 'DIFFER'}  {each.model}: {each.compared:,} results")
        for difference in each.differences[:_DIFFERENCES]:
            typer.echo(f"          {difference}")
    if any(each.differences for each in found):
        raise typer.Exit(1)


async def _replay(served: ServedConfig) -> "list[Replayed]":
    from meshrl.tinker import replay as repeat  # noqa: PLC0415 -- an extra

    return await repeat(served)


def _configured(config: str, overrides: Overrides) -> ServedConfig:
    given, source = settings(config, overrides), Path(config)
    return validate(ServedConfig, load_toml(source, given), source, given, source.parent)


async def _serve(served: ServedConfig) -> None:
    from meshrl.tinker import serve  # noqa: PLC0415 -- an extra

    with cancelled_by_sigterm():
        await serve(served, typer.echo)
