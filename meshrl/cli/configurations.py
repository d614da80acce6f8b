"""The commands about configurations: run, fork, check, simulate, new, configs."""

import asyncio
import shlex
import signal
from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from meshrl import log
from meshrl.cli.application import WITH_SETTINGS, ConfigArgument, Overrides, RunArgument, app, settings, write
from meshrl.cli.signals import Terminated, cancelled_by_sigterm
from meshrl.cli.terminal import show_findings, show_raised
from meshrl.engines.local import RankLoop
from meshrl.errors import ConfigError
from meshrl.report import diagnose, find_run, read_numbers
from meshrl.run import (
    Job,
    Run,
    RunConfig,
    about,
    copy_script,
    examine,
    find_config,
    find_mistakes,
    is_shipped,
    list_of_mistakes,
    load_job,
    pin,
    plan_fork,
    run_job,
    shipped_configs,
    unseen,
)
from meshrl.tasks import TaskConfig


@app.command(context_settings=WITH_SETTINGS)
def run(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Check a configuration and run it. Its files go to runs/NAME."""
    _show_summary(_to_its_end(pin(_checked(config, overrides, memory=False))))


@app.command(context_settings=WITH_SETTINGS)
def fork(
    run: RunArgument,
    step: Annotated[int, typer.Option(min=1, help="After so many of its steps the new run does otherwise.")],
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Of the new run; else RUN-at-STEP.")] = None,
) -> None:
    """Run an earlier run again from one of its steps, with other settings. Its files go to runs/NAME."""
    earlier = find_run(run)
    planned = plan_fork(earlier, step, name, settings(run, overrides))
    source = str(earlier / "config.toml")
    alike, onward = (pin(_checked(source, [*given], memory=False)) for given in (planned.alike, planned.onward))
    planned.begin()
    if not planned.has_all:
        _to_its_end(alike)
    planned.reseed()
    planned.note(overrides or [])
    _show_summary(_to_its_end(onward))


def _to_its_end(job: Job[RunConfig]) -> Path:
    """Run a job; the folder of the run, which has ended. Exits where somebody interrupts it."""
    begun: list[Run] = []
    try:
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            runner.run(_run(job, begun))
    except (KeyboardInterrupt, Terminated) as ending:
        where = f" What was recorded so far is in {begun[-1].recorder.folder}" if begun else ""
        typer.echo(f"Interrupted.{where}", err=True)
        number = signal.SIGTERM if isinstance(ending, Terminated) else signal.SIGINT
        raise typer.Exit(128 + number) from None
    return begun[-1].folder


@app.command(context_settings=WITH_SETTINGS)
def check(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Find what is wrong with a configuration before any model loads."""
    job = _checked(config, overrides)
    task: object = getattr(job.config, "task", None)
    told = unseen(task) if isinstance(task, TaskConfig) else None
    typer.echo(f"{job.source}: nothing wrong was found{f'; {told}' if told else ''}")


@app.command(context_settings=WITH_SETTINGS)
def simulate(  # noqa: PLR0913, PLR0917 -- the options of a command
    config: ConfigArgument,
    overrides: Overrides = None,
    steps: Annotated[
        int | None, typer.Option(help="How many steps of the script; else as many as are configured.")
    ] = None,
    recorded: Annotated[
        str | None, typer.Option("--from", metavar="RUN", help="A recorded run, whose calls tell what calls take.")
    ] = None,
    rollout: Annotated[float | None, typer.Option(help="Or a guess: seconds of one rank's rollouts of a step.")] = None,
    train: Annotated[float | None, typer.Option(help="And: seconds of one rank's update on them.")] = None,
    seed: Annotated[int, typer.Option(help="What is drawn of the recorded times.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the numbers to this file.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the simulated run's folder here.")] = None,
) -> None:
    """Say what a configuration's steps would take: its script in virtual time, without models."""
    from meshrl.simulation import simulate_job  # noqa: PLC0415 -- no other command needs the testing kit

    given = [*settings(config, overrides), *([f"steps={steps}"] if steps is not None else [])]
    job = load_job(find_config(config), given, RunConfig)
    record = find_run(recorded) if recorded else None
    forecast = simulate_job(job, record=record, rollout=rollout, train=train, seed=seed, folder=folder)
    table = Table(box=None, show_header=False)
    for name, value in forecast.lines():
        table.add_row(name, value)
    Console().print(table)
    if json:
        write(json, msgspec.json.encode(forecast))


@app.command()
def new(
    algorithm: Annotated[str, typer.Argument(metavar="ALGORITHM", help="A shipped algorithm, such as grpo.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the copies go.")],
) -> None:
    """Write an algorithm, a configuration, rows and a reward into a folder, to change them."""
    written = copy_script(algorithm, folder)
    for path in written:
        typer.echo(f"wrote {path}")
    (config,) = (path for path in written if path.suffix == ".toml")
    job = load_job(config, [], RunConfig)
    first = [mistake for mistake in find_mistakes(job.config) if "writes it" in mistake]
    for mistake in first:
        typer.echo(f"first: {mistake}")
    typer.echo(f"{'then ' if first else ''}run it with: meshrl run {shlex.quote(str(config))}")


@app.command()
def configs() -> None:
    """List the shipped configurations."""
    table = Table("name", "what it is", box=None, header_style="bold")
    table.columns[0].no_wrap = True
    for name, path in shipped_configs().items():
        table.add_row(name, about(path))
    Console().print(table)


def _checked(config: str, overrides: list[str] | None, *, memory: bool = True) -> Job[RunConfig]:
    """A configuration in which nothing wrong is found; its doubts are told. ConfigError with all that is wrong.

    `memory`: whether GPUs are doubted to have enough though no `gib` says what they have, which takes seconds to tell.
    """
    given = settings(config, overrides)
    job = load_job(find_config(config), given, RunConfig)
    memory = memory or any(mesh.gib for mesh in job.run.meshes.values())
    found = examine(job.config, job.run, memory=memory)
    if found.mistakes:
        raise ConfigError(list_of_mistakes(job.source, found.mistakes, given))
    for doubt in found.doubts:
        log.warning(f"{job.source}: {doubt}")
    return job


async def _run(job: Job[RunConfig], begun: list[Run]) -> None:
    """Run a job; `begun` gets its runs, for whom it interrupts. What a user's script raises is told as its own."""
    try:
        with cancelled_by_sigterm():
            await run_job(job, begun.append)
    except Exception as error:
        if not is_shipped(job.script):
            show_raised(error, job.script.path)
        raise


def _show_summary(folder: Path) -> None:
    summary: object = msgspec.json.decode((folder / "summary.json").read_bytes())
    table = Table(box=None, show_header=False)
    for name, value in cast("dict[str, object]", summary).items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    table.add_row("folder", str(folder))
    Console().print(table)
    show_findings(diagnose(read_numbers(folder)))
