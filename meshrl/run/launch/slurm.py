"""Scripts for `sbatch`, which start Ray on the nodes of a job and run a configuration there."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from meshrl.errors import ConfigError
from meshrl.run.launch.needs import Need, check_enough, nodes_for

_BODY: Final = r"""
set -euo pipefail
cd {folder}
export PATH={programs}:"$PATH"
# Nobody else may use the cluster of this job.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# Two jobs that share a node have two ports.
PORT=$((20000 + SLURM_JOB_ID % 20000))
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun does not take over --cpus-per-task of sbatch since Slurm 22.05, and would give a step one core.
CORES=${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}}
on() {{ srun --overlap $CORES --nodes="$1" --ntasks="$1" "${{@:2}}"; }}
IP=$(on 1 --nodelist="$HEAD" hostname --ip-address | tr ' ' '\n' | grep --max-count=1 '\.')

trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT  # Ray ends with this script
on 1 --nodelist="$HEAD" ray start --head --block --node-ip-address="$IP" --port="$PORT" {has} &
if [ "$SLURM_NNODES" -gt 1 ]; then
  # They try until the head is there.
  on $((SLURM_NNODES - 1)) --exclude="$HEAD" ray start --block --address="$IP:$PORT" {has} &
fi
NODES="import ray; ray.init('$IP:$PORT', logging_level='ERROR'); print(sum(node['Alive'] for node in ray.nodes()))"
for _ in $(seq 60); do
  FOUND=$(on 1 --nodelist="$HEAD" python -c "$NODES" 2> /dev/null | tail -n 1) || FOUND=0
  [ "${{FOUND:-0}}" -ge "$SLURM_NNODES" ] && break
  sleep 5
done
if [ "${{FOUND:-0}}" -lt "$SLURM_NNODES" ]; then
  echo "error: ${{FOUND:-0}} of $SLURM_NNODES nodes have started Ray" >&2
  exit 1
fi
on 1 --nodelist="$HEAD" meshrl run {arguments} run.engine="$IP:$PORT"
"""


@dataclass(frozen=True)
class SlurmOptions:
    """Options for SLURM, in addition to the needs of the meshes."""

    gpus_per_node: int = 8
    """GPUs to request per node, if a mesh asks for GPUs."""
    cpus_per_node: int | None = None
    """CPUs to request per node. None: whole nodes."""
    nodes: int | None = None
    """Number of nodes. None: as many as the meshes need."""
    lines: Sequence[str] = ()
    """More options of sbatch, such as `--partition=gpu` and `--time=1-00:00:00`."""


def slurm_script(name: str, arguments: Sequence[str], needs: Sequence[Need], options: SlurmOptions) -> str:
    """Return the script of a job that runs `meshrl run ARGUMENTS`, in the current folder and with this Python.

    Both must be at the same path on each node. Raises `ConfigError` if the nodes have no room for the meshes.
    """
    gpus = options.gpus_per_node if any(need.gpus for need in needs) else 0
    nodes = options.nodes or nodes_for(needs, gpus, options.cpus_per_node)
    check_enough(needs, nodes, gpus, options.cpus_per_node)
    for line in options.lines:
        if not line.startswith("-") or "\n" in line:
            raise ConfigError(f"{line!r} is not an option of sbatch: write it as --partition=gpu")
    asked = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", f"--output={name}-%j.log"]
    asked += [f"--gpus-per-node={gpus}"] if gpus else []
    asked += [f"--cpus-per-task={options.cpus_per_node}"] if options.cpus_per_node else ["--exclusive"]
    has = [*([f"--num-cpus={options.cpus_per_node}"] if options.cpus_per_node else []), f"--num-gpus={gpus}"]
    body = _BODY.format(
        folder=shlex.quote(str(Path.cwd())),
        programs=shlex.quote(str(Path(sys.executable).parent)),
        has=" ".join(has),
        arguments=shlex.join(arguments),
    )
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in [*asked, *options.lines])]) + "\n" + body


def submit(script: Path) -> str:
    """Submit a script to SLURM, and return its answer. Raises `ConfigError` if there is no SLURM, or if it refuses."""
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError(f"there is no sbatch on this machine: submit {script} on one that has it")
    done = subprocess.run([program, str(script)], capture_output=True, text=True, check=False)  # noqa: S603 -- the user's
    if done.returncode:
        raise ConfigError(f"sbatch refused {script}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
