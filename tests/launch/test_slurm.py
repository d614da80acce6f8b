"""What `meshrl launch slurm` writes, which bash runs with stand-ins for SLURM's programs."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.first_hour.terminal import done, refused


def written(config: Path, *arguments: str) -> str:
    done("launch", "slurm", str(config), *arguments)
    return Path("mine.sbatch").read_text()


def test_a_script_asks_for_what_the_meshes_need(config: Path) -> None:
    lines = written(config, "steps=3", "--sbatch=--partition=gpu", "--sbatch=--time=1:00").splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert asked >= {"--nodes=2", "--gpus-per-node=8", "--exclusive", "--partition=gpu", "--time=1:00"}
    assert lines[0] == "#!/bin/bash"
    assert lines[-1].endswith(f'meshrl run {config} steps=3 run.engine="$IP:$PORT"')
    odd = config.rename(config.with_name("my $HOME config.toml"))
    assert f"meshrl run '{odd}' run.engine=" in written(odd)


@pytest.mark.parametrize("cores", [None, 16])
def test_each_step_has_the_cores_of_its_node(config: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None) -> None:
    written(config, *([f"--cpus-per-node={cores}"] if cores else []))
    steps = config.with_name("steps")
    began = f"until [ $(grep -c ^--overlap {steps}) -ge 4 ]; do sleep .05; done"  # Ray starts in the background
    answers = f"case $* in *--ip-address*) echo 10.0.0.1 ;; *ray.nodes*) {began}; echo 2 ;; esac"
    for name, line in {"srun": f'echo "$*" >> {steps}; {answers}', "scontrol": "echo node1"}.items():
        config.with_name(name).write_text(f"#!/bin/sh\n{line}\n")
        config.with_name(name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{config.parent}:{os.environ['PATH']}")
    for name in ("JOB_ID=7", "JOB_NODELIST=node[1-2]", "NNODES=2", *([f"CPUS_PER_TASK={cores}"] if cores else [])):
        monkeypatch.setenv(*f"SLURM_{name}".split("=", 1))
    subprocess.run(["bash", "mine.sbatch"], check=True)  # noqa: S607
    said = [line for line in steps.read_text().splitlines() if line.startswith("--overlap")]
    assert len(said) == 5  # the address, Ray's head, the other node, their count, the run
    assert all(("--cpus-per-task=16" in line) == bool(cores) for line in said)


def test_bad_input_is_told_before_anything_is_written(config: Path) -> None:
    cases = {
        ("--nodes", "1"): "the meshes need 2 nodes of this size, but only 1 are asked for",
        ("--cpus-per-node", "2"): "a rank of the mesh 'train' asks for 4 CPU and 1 GPU, and a node has 2 CPU and 8 GPU",
        ("--sbatch", "gpu"): "'gpu' is not an option of sbatch",
        ("--sbatch", "--a\nrm"): "is not an option of sbatch",
    }
    for arguments, told in cases.items():
        assert told in refused("launch", "slurm", str(config), *arguments)
        assert not Path("mine.sbatch").exists()


def test_a_script_is_handed_in_where_there_is_slurm(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ("launch", "slurm", str(config), "--submit")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no sbatch on this machine: submit mine.sbatch on one that has it" in refused(*submit)
    monkeypatch.setenv("PATH", f"{config.parent}:/usr/bin:/bin")
    sbatch = config.with_name("sbatch")
    sbatch.write_text("#!/bin/sh\ntest -f $1 && echo Submitted batch job 7\n")
    sbatch.chmod(0o755)
    assert "Submitted batch job 7" in done(*submit).told
    sbatch.write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    assert "sbatch refused mine.sbatch: no such partition" in refused(*submit)
