"""The command `memory`: the memory that a rank needs, and the settings that would save some."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from meshrl.cli.application import WITH_SETTINGS, ConfigArgument, Overrides, app, settings, write
from meshrl.run import Asked, Held, MemoryPlan, RankMemory, RunConfig, find_config, load_job, plan_memory, savings_of

_GIB = 2**30


@app.command(context_settings=WITH_SETTINGS)
def memory(
    config: ConfigArgument,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of ranks in the mesh, with one GPU each.")] = None,
    gib: Annotated[
        float | None, typer.Option(help="GiB of memory of a rank's GPU. Default: run.meshes.NAME.gib, or 80.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest prompt. Default: task.max_prompt_tokens.")
    ] = None,
    completion: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest completion. Default: sampling.max_tokens.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file.")] = None,
) -> None:
    """Estimate how much memory a rank needs, before the run. Allocates nothing and reads no weights."""
    given, file = settings(config, overrides), find_config(config)

    known: dict[str, Held] = {}

    def planned(further: Sequence[str], asked: Asked) -> MemoryPlan:
        job = load_job(file, [*given, *further], RunConfig)
        return plan_memory(job.config, job.run, asked, known)

    asked = Asked(gpus, gib, prompt, completion)
    plan = planned([], asked)
    plan = replace(plan, savings=savings_of(plan, asked, planned))
    console = Console()
    for mesh in plan.meshes:
        _show(console, mesh)
    for told in plan.assumed:
        typer.echo(f"assumed: {told}")
    for saving in plan.savings:
        typer.echo(f"{saving.setting} would save {saving.nbytes / _GIB:.2f} GiB on each rank of {saving.mesh}")
    if json:
        write(json, msgspec.json.encode(plan))


def _show(console: Console, mesh: RankMemory) -> None:
    """Print a rank's tables: what it holds in GPU memory, then what it holds in the machine's memory."""
    axes = " ".join(f"{axis}={size}" for axis, size in mesh.axes.items())
    for host in (False, True):
        terms = list(mesh.terms(host=host))
        if not terms:
            continue
        where = "the machine's memory" if host else "GPU memory"
        title = f"{mesh.mesh}: each of {mesh.ranks} ranks ({axes}), {where}"
        table = Table("role", "term", "GiB", "during", "formula", box=None, header_style="bold", title=title)
        table.title_justify, table.columns[2].justify = "left", "right"
        for role, term in terms:
            table.add_row(role, term.name, f"{term.nbytes / _GIB:.3f}", term.during or "always", term.formula)
        most, call = mesh.peak(host=host)
        table.add_row("", "peak", f"{most / _GIB:.3f}", call or "always", "what is always held, and this call's share")
        console.print(table)
    for held in mesh.roles:
        for note in held.memory.notes if held.memory else (f"unknown: {held.unknown}",):
            typer.echo(f"{held.role}: {note}")
    if mesh.gib is not None:
        typer.echo(f"{mesh.mesh}: {_left(mesh, mesh.gib)}")


def _left(mesh: RankMemory, gib: float) -> str:
    """Say how much of a rank's memory stays free, if the memory of all its roles is known."""
    lacking = ", ".join(mesh.unknown)
    told = f"{mesh.needed / _GIB:.2f} of {gib:g} GiB{f' without {lacking}' if lacking else ''}"
    if mesh.headroom is None:
        return f"{told}: it may not fit, because the memory of {lacking} is unknown"
    if mesh.headroom < 0:
        return f"{told}: it does not fit: {-mesh.headroom / _GIB:.2f} GiB more are needed"
    return f"{told}: {mesh.headroom / _GIB:.2f} GiB are free"
