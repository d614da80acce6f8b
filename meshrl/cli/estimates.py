"""The commands that estimate before a run: memory, plan."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from meshrl.cli.application import (
    WITH_SETTINGS,
    ConfigArgument,
    DurationSeed,
    JsonOut,
    Overrides,
    RolloutSeconds,
    TrainSeconds,
    app,
    settings,
    write_json,
)
from meshrl.errors import ConfigError
from meshrl.observe import BOUND, find_run
from meshrl.planning import Devices, Plan, PlanOptions, make_plan
from meshrl.run import (
    MemoryOptions,
    MemoryPlan,
    RankMemory,
    RoleMemory,
    find_config,
    load_job,
    plan_memory,
    savings_of,
)

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
    json: JsonOut = None,
) -> None:
    """Estimate how much memory a rank needs, before the run. Allocates nothing and reads no weights."""
    given, file = settings(config, overrides), find_config(config)
    known: dict[str, RoleMemory] = {}

    def planned(further: Sequence[str], asked: MemoryOptions) -> MemoryPlan:
        job = load_job(file, [*given, *further])
        return plan_memory(job.config, job.run, asked, known)

    asked = MemoryOptions(gpus, gib, prompt, completion)
    plan = planned([], asked)
    plan = replace(plan, savings=savings_of(plan, asked, planned))
    console = Console()
    for mesh in plan.meshes:
        _show_memory(console, mesh)
    for assumption in plan.assumed:
        typer.echo(f"assumed: {assumption}")
    for saving in plan.savings:
        typer.echo(f"{saving.setting} would save {saving.nbytes / _GIB:.2f} GiB on each rank of {saving.mesh}")
    write_json(json, plan)


def _show_memory(console: Console, mesh: RankMemory) -> None:
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
        typer.echo(f"{mesh.mesh}: {_free(mesh, mesh.gib)}")


def _free(mesh: RankMemory, gib: float) -> str:
    """Say how much of a rank's memory stays free, if the memory of all its roles is known."""
    lacking = ", ".join(mesh.unknown)
    needed = f"{mesh.needed / _GIB:.2f} of {gib:g} GiB{f' without {lacking}' if lacking else ''}"
    if mesh.headroom is None:
        return f"{needed}: it may not fit, because the memory of {lacking} is unknown"
    if mesh.headroom < 0:
        return f"{needed}: it does not fit: {-mesh.headroom / _GIB:.2f} GiB more are needed"
    return f"{needed}: {mesh.headroom / _GIB:.2f} GiB are free"


@app.command(context_settings=WITH_SETTINGS)
def plan(  # noqa: PLR0913, PLR0917 -- the options of a command
    config: ConfigArgument,
    overrides: Overrides = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to divide among the roles, one for each rank.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores to divide, instead of GPUs.")] = None,
    recorded: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="RUN", help="A recorded run to take the durations of calls from. Repeatable."),
    ] = None,
    rollout: RolloutSeconds = None,
    train: TrainSeconds = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory of each GPU, or of the machine with --cpus.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a GPU or a core for an hour.")] = None,
    best: Annotated[int, typer.Option(min=1, help="Number of proposals to show.")] = 5,
    seed: DurationSeed = 0,
    json: JsonOut = None,
) -> None:
    """Find the split of GPUs or cores that makes a configuration's steps shortest."""
    given = settings(config, overrides)
    if (gpus is None) == (cpus is None):
        raise ConfigError("nothing to divide: give either --gpus N or --cpus N")
    made = make_plan(
        config,
        given,
        PlanOptions(
            devices=Devices(gpus, "gpus") if gpus else Devices(cpus or 0, "cpus"),
            records=[find_run(each) for each in recorded or []],
            rollout=rollout,
            train=train,
            memory=memory,
            price=price,
            best=best,
            seed=seed,
        ),
    )
    _show_plan(made)
    write_json(json, made)


def _show_plan(made: Plan) -> None:
    """Print the best proposals, the command for each, and how reliable the estimates are."""
    proposals = list(enumerate(made.proposals, start=1))
    gib, cost = (any(getattr(each, name) is not None for each in made.proposals) for name in ("needed_gib", "cost"))
    table = Table(box=None, header_style="bold")
    heads = ["", "steps a minute", "between", "efficiency", "bound by", "staleness"]
    for head in (*heads, *["GiB"] * gib, *["cost a step"] * cost):
        table.add_column(head, no_wrap=True)
    for number, each in proposals:
        cells = [f"{number}", f"{_rate(each.steps_per_minute)}{'*' if each.guessed else ''}"]
        cells += [f"{_rate(each.low)} to {_rate(each.high)}", f"{each.efficiency:.2f}"]
        cells += [BOUND.get(each.bound_by, each.bound_by), f"{each.staleness:.2f}"]
        cells += ["?" if each.needed_gib is None else f"{each.needed_gib:.1f}"] if gib else []
        cells += [f"{each.cost:.4g}"] if cost else []
        table.add_row(*cells)
    Console().print(table)
    for number, each in proposals:
        typer.echo(f"{number}: {each.name}\n   {made.command(each)}")
    for guess in dict.fromkeys(guess for each in made.proposals for guess in each.guessed):
        typer.echo(f"* guessed, because no record has it: {guess}")
    for run, ratio in made.records.items():
        typer.echo(f"{run}: the prediction for its own steps is {ratio:.2f} times the measured time")
    for unknown in made.unknown:
        typer.echo(f"memory unknown, assumed to fit: {unknown}")
    typer.echo(
        f"{made.candidates:,} candidates on {made.devices}: {made.simulated:,} simulated, {made.pruned:,} cannot be "
        f"among the best, {made.refused:,} do not fit; {made.seconds:.1f} s"
    )


def _rate(steps: float) -> str:
    """Steps per minute, with three digits or all digits before the point."""
    return f"{steps:,.0f}" if steps >= 100 else f"{steps:.3g}"
