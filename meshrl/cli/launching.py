"""The commands that run a configuration on several machines: launch slurm, launch kuberay, launch ssh."""

import signal
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from meshrl.cli.application import WITH_SETTINGS, ConfigArgument, Overrides, app, settings, write
from meshrl.errors import ConfigError
from meshrl.run import Job, find_config, find_mistakes, list_of_mistakes, load_job, shipped_configs
from meshrl.run.launch import SSH, Pods, SshCluster, files_beside, needs_of, ray_job, slurm_script, submit, yaml_text

launch: typer.Typer = typer.Typer(
    help="Run on several machines, with SLURM, with KubeRay, or over ssh.", no_args_is_help=True
)
app.add_typer(launch, name="launch")

Nodes = Annotated[int | None, typer.Option(min=1, help="Number of machines. Default: as many as the meshes need.")]
GpusPerNode = Annotated[int, typer.Option(min=1, help="GPUs of each machine, if a mesh asks for GPUs.")]


@launch.command(context_settings=WITH_SETTINGS)
def slurm(
    config: ConfigArgument,
    overrides: Overrides = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 8,
    cpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="CPU cores to request on each node. Default: whole nodes.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Another option for sbatch, such as --sbatch=--partition=gpu. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The script to write. Default: RUN.sbatch.")
    ] = None,
    hand_in: Annotated[bool, typer.Option("--submit", help="Submit the script to SLURM as well.")] = False,
) -> None:
    """Write an sbatch script that starts Ray on the job's nodes and runs a configuration there."""
    given, job = _job(config, overrides)
    text = slurm_script(job.run.name, given, needs_of(job), gpus_per_node, cpus_per_node, nodes, sbatch or [])
    file = out or Path(f"{job.run.name}.sbatch")
    write(file, text.encode())
    typer.echo(submit(file) if hand_in else f"submit it with: sbatch {file}")


@launch.command(context_settings=WITH_SETTINGS)
def kuberay(  # noqa: PLR0913 -- the options of a command
    config: ConfigArgument,
    overrides: Overrides = None,
    *,
    image: Annotated[str, typer.Option(help="Container image with meshrl, its backends and what the script needs.")],
    workers: Nodes = None,
    gpus_per_worker: GpusPerNode = 8,
    cpus_per_worker: Annotated[int, typer.Option(min=1, help="CPU cores of each worker.")] = 8,
    memory: Annotated[str, typer.Option(help="Memory of each worker.")] = "32Gi",
    volume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLAIM:PATH", help="A volume to mount, for models, data and the folder of runs. Repeatable."
        ),
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Kubernetes namespace of the RayJob.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The manifest to write. Default: RUN.yaml.")
    ] = None,
) -> None:
    """Write a RayJob for kubectl. A ConfigMap carries the configuration and the Python files next to it."""
    given, job = _job(config, overrides)
    volumes: dict[str, str] = {}
    for each in volume or []:
        claim, colon, place = each.partition(":")
        if not (claim and colon and place.startswith("/")):
            raise ConfigError(f"--volume {each}: write CLAIM:PATH, such as --volume shared:/shared")
        volumes[claim] = place
    folder = Path(job.run.folder)
    if not any(folder.is_relative_to(place) for place in volumes.values()):
        raise ConfigError(
            f"run.folder = {str(folder)!r} is on no volume and is lost when its pod ends: mount a volume with --volume "
            "CLAIM:PATH, and set run.folder=PATH/runs"
        )
    pods = Pods(image, gpus_per_worker, cpus_per_worker, memory, workers, volumes, namespace)
    own = config not in shipped_configs() or Path(config).is_file()
    arguments = [job.source.name, *given[1:]] if own else given
    documents = ray_job(job.run.name, arguments, needs_of(job), pods, files_beside(job.source) if own else {})
    file = out or Path(f"{job.run.name}.yaml")
    write(file, "---\n".join(map(yaml_text, documents)).encode())
    typer.echo(f"start it with: kubectl apply -f {file}")


@launch.command(context_settings=WITH_SETTINGS)
def ssh(
    config: ConfigArgument,
    overrides: Overrides = None,
    *,
    hosts: Annotated[
        str, typer.Option(metavar="HOST,HOST", help="Hosts to run on, as ssh names them. The first runs the script.")
    ],
    command: Annotated[
        str, typer.Option("--ssh", metavar="COMMAND", help="Command that takes a host and a shell command line.")
    ] = SSH,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Ray on the first host.")] = 6379,
    python: Annotated[
        str | None, typer.Option(help="Path of Python on the hosts. Default: the path of this Python.")
    ] = None,
) -> None:
    """Start Ray on hosts over ssh, run a configuration there, and stop Ray at the end or on Ctrl-C."""
    given, job = _job(config, overrides)
    needs = needs_of(job)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        names = [each.strip() for each in hosts.split(",") if each.strip()]
        with SshCluster(names, command, port, *([python] if python else [])) as cluster:
            cluster.check(needs)
            cluster.start()
            status = cluster.run(given)
    except KeyboardInterrupt:
        typer.echo("Interrupted: Ray has ended on the hosts.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    raise typer.Exit(status)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _job(config: str, overrides: list[str] | None) -> tuple[list[str], Job]:
    """Return the arguments of `meshrl run` on the machines, and the job. ConfigError lists its mistakes."""
    given = settings(config, overrides)
    if engine := [each for each in given if each.startswith("run.engine=")]:
        raise ConfigError(f"{engine[0]}: `meshrl launch` chooses the engine: leave this key out")
    source = find_config(config)
    job = load_job(source, [*given, "run.engine=auto"])
    if mistakes := find_mistakes(job.config, job.run):
        raise ConfigError(list_of_mistakes(job.source, mistakes, given))
    own = str(source.resolve()) if Path(config).is_file() else config
    return [own, *given], job
