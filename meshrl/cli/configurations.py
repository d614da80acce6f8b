"""The commands that take configurations: run, train, fork, check, simulate, new, configs, memory, plan."""

import shlex
import signal
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from meshrl import log
from meshrl.cli.application import (
    WITH_SETTINGS,
    ConfigArgument,
    DurationSeed,
    JsonOut,
    Overrides,
    RolloutSeconds,
    RunArgument,
    Terminated,
    TrainSeconds,
    app,
    cancelled_by_sigterm,
    run_async,
    settings,
    show_findings,
    show_lines,
    write,
    write_json,
)
from meshrl.errors import ConfigError, MeshrlError, described
from meshrl.observe import BOUND, diagnose, find_run, read_numbers
from meshrl.planning import Devices, Plan, PlanOptions, make_plan, simulate_job
from meshrl.run import (
    Job,
    MemoryOptions,
    MemoryPlan,
    RankMemory,
    RoleMemory,
    Run,
    copy_script,
    description_of,
    examine,
    find_config,
    find_mistakes,
    is_shipped,
    list_of_mistakes,
    load_job,
    make_job,
    newest_checkpoint,
    pin,
    plan_fork,
    plan_memory,
    recipe,
    recipe_text,
    run_job,
    savings_of,
    shipped_configs,
    unchecked_rows,
)
from meshrl.tasks import Task, TaskConfig
from meshrl.user_code import frames_of, is_of_meshrl

_GIB: Final = 2**30


@app.command(context_settings=WITH_SETTINGS)
def run(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Check a configuration and run it. The run's files go to runs/NAME."""
    _show_summary(_run_to_end(pin(_checked(config, overrides, memory=False))))


@app.command(context_settings=WITH_SETTINGS)
def train(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task by name, such as gsm8k.")],
    overrides: Overrides = None,
    model: Annotated[str, typer.Option(help="The model to train: a folder, or ORG/NAME on the hub.")] = "",
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Only write the configuration to this file, to be edited.")
    ] = None,
) -> None:
    """Train a model by GRPO on a task by name. Prints the configuration, and runs it."""
    if not model:
        raise ConfigError(f"no model to train: meshrl train {task} --model ORG/NAME, or a folder")
    given = settings(task, overrides)
    table = recipe(task, model, given)
    text = recipe_text(task, table)
    job = make_job(Path(f"{task}.toml"), table, Path(), given)
    if save:
        write(save, text.encode())
        return
    typer.echo(text)
    _show_summary(_run_to_end(pin(_examined(job, given, memory=False))))


@app.command(context_settings=WITH_SETTINGS)
def fork(
    run: RunArgument,
    step: Annotated[int, typer.Option(min=1, help="The new settings apply after this step of the earlier run.")],
    overrides: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the new run. Default: RUN-at-STEP.")] = None,
) -> None:
    """Repeat an earlier run from one of its steps with other settings. The files of the new run go to runs/NAME."""
    earlier = find_run(run)
    planned = plan_fork(earlier, step, name, settings(run, overrides))
    source = str(earlier / "config.toml")
    alike, onward = (pin(_checked(source, [*given], memory=False)) for given in (planned.alike, planned.onward))
    planned.begin()
    if not planned.has_all:
        _run_to_end(alike, continues=False)
    planned.reseed()
    planned.note(overrides or [])
    _show_summary(_run_to_end(onward))


def _run_to_end(job: Job, *, continues: bool = True) -> Path:
    """Run a job to its end and return the run's folder. Exits if it is interrupted.

    `continues`: its configuration is that of the whole run, so that it can be continued with `run.resume`.
    """
    begun: list[Run] = []
    try:
        run_async(_run(job, begun))
    except (KeyboardInterrupt, Terminated) as ending:
        advice = _after_interruption(begun[-1].recorder.folder, continues) if begun else ""
        typer.echo(f"Interrupted.{advice}", err=True)
        number = signal.SIGTERM if isinstance(ending, Terminated) else signal.SIGINT
        raise typer.Exit(128 + number) from None
    return begun[-1].folder


def _after_interruption(folder: Path, continues: bool) -> str:
    where = f" What was recorded so far is in {folder}"
    if not continues:
        return f"{where}\nTo fork again, remove it first"
    if newest_checkpoint(folder) is None:
        return where
    command = f"meshrl run {shlex.quote(str(folder / 'config.toml'))} run.resume=true"
    return f"{where}\nTo continue from its newest checkpoint: {command}"


@app.command(context_settings=WITH_SETTINGS)
def check(config: ConfigArgument, overrides: Overrides = None) -> None:
    """Find mistakes in a configuration before any model loads."""
    job = _checked(config, overrides)
    task: object = getattr(job.config, "task", None)
    note = unchecked_rows(task) if isinstance(task, TaskConfig) else None
    if isinstance(task, TaskConfig) and note is None:
        Task.load(task)  # logs what a run would leave out
    typer.echo(f"{job.source}: no mistakes found{f'; {note}' if note else ''}")


@app.command(context_settings=WITH_SETTINGS)
def simulate(  # noqa: PLR0913, PLR0917 -- the options of a command
    config: ConfigArgument,
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(help="Steps to simulate. Default: those of the configuration.")] = None,
    recorded: Annotated[
        str | None, typer.Option("--from", metavar="RUN", help="A recorded run to take the durations of calls from.")
    ] = None,
    rollout: RolloutSeconds = None,
    train: TrainSeconds = None,
    seed: DurationSeed = 0,
    json: JsonOut = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the simulated run's folder here.")] = None,
) -> None:
    """Estimate how long a configuration's steps take. The script runs in virtual time, without models."""
    given = [*settings(config, overrides), *([f"steps={steps}"] if steps is not None else [])]
    job = load_job(find_config(config), given)
    record = find_run(recorded) if recorded else None
    forecast = simulate_job(job, record=record, rollout=rollout, train=train, seed=seed, folder=folder)
    show_lines(forecast.lines())
    write_json(json, forecast)


@app.command()
def new(
    algorithm: Annotated[
        str, typer.Argument(metavar="ALGORITHM", help="A shipped algorithm, such as grpo, or verifiers:TASKSET.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to.")],
) -> None:
    """Copy an algorithm, its configuration, some rows and a reward into a folder, as a starting point."""
    written = copy_script(algorithm, folder)
    for path in written:
        typer.echo(f"wrote {path}")
    (config,) = (path for path in written if path.suffix == ".toml")
    job = load_job(config, [])
    first = [mistake for mistake in find_mistakes(job.config) if "writes it" in mistake]
    for mistake in first:
        typer.echo(f"first: {mistake}")
    typer.echo(f"{'then ' if first else ''}run it with: meshrl run {shlex.quote(str(config))}")


@app.command()
def configs() -> None:
    """List the shipped configurations."""
    table = Table("name", "description", box=None, header_style="bold")
    table.columns[0].no_wrap = True
    for name, path in shipped_configs().items():
        table.add_row(name, description_of(path))
    Console().print(table)


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

    def planned(further: Sequence[str], options: MemoryOptions) -> MemoryPlan:
        job = load_job(file, [*given, *further])
        return plan_memory(job.config, job.run, options, known)

    options = MemoryOptions(gpus, gib, prompt, completion)
    plan = planned([], options)
    plan = replace(plan, savings=savings_of(plan, options, planned))
    console = Console()
    for mesh in plan.meshes:
        _show_memory(console, mesh)
    for assumption in plan.assumed:
        typer.echo(f"assumed: {assumption}")
    for saving in plan.savings:
        typer.echo(f"{saving.setting} would save {saving.nbytes / _GIB:.2f} GiB on each rank of {saving.mesh}")
    write_json(json, plan)


def _show_memory(console: Console, mesh: RankMemory) -> None:
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


def _checked(config: str, overrides: list[str] | None, *, memory: bool = True) -> Job:
    """Load and check a configuration, and log warnings about it. ConfigError lists every mistake.

    `memory`: warn if memory may run out even if no `gib` states the GPUs' memory. Takes seconds.
    """
    given = settings(config, overrides)
    return _examined(load_job(find_config(config), given), given, memory=memory)


def _examined(job: Job, given: Sequence[str], *, memory: bool) -> Job:
    memory = memory or any(mesh.gib for mesh in job.run.meshes.values())
    examination = examine(job.config, job.run, memory=memory)
    if examination.mistakes:
        raise ConfigError(list_of_mistakes(job.source, examination.mistakes, given))
    for doubt in examination.doubts:
        log.warning(f"{job.source}: {doubt}")
    for note in examination.notes:
        log.info(f"{job.source}: {note}")
    return job


async def _run(job: Job, begun: list[Run]) -> None:
    """Run a job. Its runs are appended to `begun`. Errors of a user's script are shown with the script's own lines."""
    try:
        with cancelled_by_sigterm():
            await run_job(job, begun.append)
    except Exception as error:
        if not is_shipped(job.script):
            _show_raised(error, job.script.path)
        raise


def _show_raised(error: Exception, script: Path) -> None:
    """Show an error of a user's script by the script's own lines, unless meshrl's lines are needed to understand it.

    A `MeshrlError` gets a note with the script's line, for `show_error`. Any other error ends the program here.
    """
    frames = frames_of(error, script)
    if not frames:
        return
    if isinstance(error, MeshrlError):
        error.add_note(f"({frames[-1].filename}, line {frames[-1].lineno})")
    elif not is_of_meshrl(error):
        lines = "".join(traceback.format_list(frames))
        typer.echo(f"Traceback (lines of the script only):\n{lines}{described(error)}", err=True)
        raise typer.Exit(1) from None


def _show_summary(folder: Path) -> None:
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=dict[str, object])
    lines = [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in summary.items()]
    show_lines([*lines, ("folder", str(folder))])
    typer.echo(f"read its rows with: meshrl watch {folder}")
    show_findings(diagnose(read_numbers(folder)))
