"""Scripts for `sbatch`, which start Ray on the nodes of a job and run a configuration there."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from meshrl.errors import ConfigError
from meshrl.run.launch.needs import Need, enough_nodes, filled


def slurm_script(
    name: str,
    arguments: Sequence[str],
    needs: Sequence[Need],
    gpus: int = 8,
    cpus: int | None = None,
    nodes: int | None = None,
    options: Sequence[str] = (),
) -> str:
    """Return the script of a job that runs `meshrl run ARGUMENTS`, in the current folder and with this Python.

    Both must be at the same path on each node. `gpus`, `cpus`: to request on each node, GPUs only if a mesh asks for
    some, and whole nodes without `cpus`. `nodes`: by default as many as the meshes need. `options`: more options of
    sbatch, such as `--partition=gpu`. Raises `ConfigError` if the nodes have no room for the meshes.
    """
    gpus = gpus if any(need.gpus for need in needs) else 0
    nodes = enough_nodes(needs, nodes, gpus, cpus)
    for line in options:
        if not line.startswith("-") or "\n" in line:
            raise ConfigError(f"{line!r} is not an option of sbatch: write it as --partition=gpu")
    directives = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", f"--output={name}-%j.log"]
    directives += [f"--gpus-per-node={gpus}"] if gpus else []
    directives += [f"--cpus-per-task={cpus}"] if cpus else ["--exclusive"]
    has = [*([f"--num-cpus={cpus}"] if cpus else []), f"--num-gpus={gpus}"]
    values = {
        "FOLDER": shlex.quote(str(Path.cwd())),
        "PROGRAMS": shlex.quote(str(Path(sys.executable).parent)),
        "RESOURCES": " ".join(has),
        "ARGUMENTS": shlex.join(arguments),
    }
    head = "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in [*directives, *options])])
    return f"{head}\n\n{filled('slurm.sh', values)}"


def submit(script: Path) -> str:
    """Submit a script to SLURM, and return its answer. Raises `ConfigError` if there is no SLURM, or if it refuses."""
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError(f"there is no sbatch on this machine: submit {script} on one that has it")
    done = subprocess.run([program, str(script)], capture_output=True, encoding="utf-8", errors="replace", check=False)  # noqa: S603 -- the user's
    if done.returncode:
        raise ConfigError(f"sbatch refused {script}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
