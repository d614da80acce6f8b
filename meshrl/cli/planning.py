"""The command `plan`: how to split the ranks, which layouts to use, and how far rollouts run ahead."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from meshrl.cli.application import (
    WITH_SETTINGS,
    ConfigArgument,
    Overrides,
    RolloutSeconds,
    TrainSeconds,
    app,
    settings,
    write,
)
from meshrl.errors import ConfigError
from meshrl.observe import BOUND, find_run
from meshrl.planning import Devices, Plan, Wanted, make_plan


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
    seed: Annotated[int, typer.Option(help="Seed for the choice of recorded durations.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file.")] = None,
) -> None:
    """Find the split of GPUs or cores that makes a configuration's steps shortest."""
    given = settings(config, overrides)
    if (gpus is None) == (cpus is None):
        raise ConfigError("nothing to divide: give either --gpus N or --cpus N")
    made = make_plan(
        config,
        given,
        Wanted(
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
    _show(made)
    if json:
        write(json, msgspec.json.encode(made))


def _show(made: Plan) -> None:
    """Print the best proposals, the command for each, and how reliable the estimates are."""
    told = list(enumerate(made.proposals, start=1))
    gib, cost = (any(getattr(each, name) is not None for _, each in told) for name in ("needed_gib", "cost"))
    table = Table(box=None, header_style="bold")
    heads = ["", "steps a minute", "between", "efficiency", "bound by", "staleness"]
    for head in (*heads, *(["GiB"] if gib else []), *(["cost a step"] if cost else [])):
        table.add_column(head, no_wrap=True)
    for number, each in told:
        cells = [f"{number}", f"{_rate(each.steps_per_minute)}{'*' if each.guessed else ''}"]
        cells += [f"{_rate(each.low)} to {_rate(each.high)}", f"{each.efficiency:.2f}"]
        cells += [BOUND.get(each.bound_by, each.bound_by)]
        cells += [f"{each.staleness:.2f}"]
        cells += ["?" if each.needed_gib is None else f"{each.needed_gib:.1f}"] if gib else []
        cells += [f"{each.cost:.4g}"] if cost else []
        table.add_row(*cells)
    Console().print(table)
    for number, each in told:
        typer.echo(f"{number}: {each.name}\n   {made.command(each)}")
    for guess in dict.fromkeys(guess for _, each in told for guess in each.guessed):
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
