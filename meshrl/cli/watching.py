"""The command that shows a live run: watch."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from meshrl.cli.application import app
from meshrl.cli.signals import Terminated, cancelled_by_sigterm
from meshrl.observe import run_to_watch


@app.command()
def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run's folder, or its name under runs/. It need not exist yet. Default: the newest run.",
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on. Default: 6007, or a free one.")
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Print a token that lets the page pause, checkpoint and stop the run.")
    ] = False,
) -> None:
    """Show a run's live report in a browser, on this machine only, until Ctrl-C."""
    folder, told = run_to_watch(run)
    if told:
        typer.echo(told, err=True)
    with suppress(KeyboardInterrupt, Terminated):
        asyncio.run(_watch(folder, port, control))


async def _watch(folder: Path, port: int | None, control: bool) -> None:
    from meshrl.observe import Watcher  # noqa: PLC0415 -- it needs packages of an extra

    with cancelled_by_sigterm():
        watcher = Watcher(folder, control=control)
        async with watcher.serving(port):
            typer.echo(f"{folder}: {watcher.address}")
            await asyncio.Event().wait()
