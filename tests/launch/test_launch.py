"""What `meshrl launch` makes of meshes for KubeRay by its schema, for SLURM by bash and stand-ins, and for ssh."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshrl.run.launch import SSH, Need, SshCluster, nodes_for, yaml_text
from tests.first_hour.terminal import done, refused

SCRIPT = """
import meshrl as rl
from meshrl.config import Config


class MineConfig(Config):
    steps: int = 2
    policy: rl.PolicyConfig = rl.PolicyConfig(model="", backend="fake", mesh="train")
    sampler: rl.SamplerConfig = rl.SamplerConfig(model="", backend="fake", mesh="rollout")


async def mine(run: rl.Run, config: MineConfig) -> None: ...
"""
CONFIG = """algorithm = "mine.py"
run.name = "mine"
run.meshes.train = {{ ranks = 8, cpus = 4, gpus = {gpus} }}
run.meshes.rollout = {{ ranks = 8, gpus = {share} }}
"""
VOLUME = ("run.folder=/shared/runs", "--volume", "shared:/shared")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SCRIPT)
    file = tmp_path / "mine.toml"
    file.write_text(CONFIG.format(gpus=1, share=0.5))
    return file


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """As Kubernetes reads a part with strict validation: a field that is not there is a mistake."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        return {**schema, "additionalProperties": not schema["properties"]}
    return schema


def checked(job: Any) -> None:
    text = Path(__file__).with_name("data").joinpath("rayjob-v1.json").read_text()
    schema = json.loads(text, object_hook=strict)["schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(job, schema)


def command(config: Path, *arguments: str) -> tuple[str, ...]:
    return ("launch", "kuberay", str(config), *arguments, "--image", "my/meshrl:1")


def written(config: Path, *arguments: str) -> list[Any]:
    done(*command(config, *arguments))
    return list(yaml.safe_load_all(Path("mine.yaml").read_text()))


def test_a_job_is_as_the_schema_wants_it_and_has_room_for_the_meshes(config: Path) -> None:
    settings, job = written(config, "steps=3", *VOLUME, "--cpus-per-worker", "32", "--namespace", "lab")
    checked(job)
    assert settings["data"] == {"mine.toml": config.read_text(), "mine.py": config.with_name("mine.py").read_text()}
    assert job["metadata"] == {"name": "mine", "namespace": "lab"}
    run = "exec meshrl run mine.toml steps=3 run.folder=/shared/runs run.engine=auto"
    assert job["spec"]["entrypoint"] == f"bash -c 'cd /etc/meshrl && {run}'"
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert {group["replicas"], group["minReplicas"], group["maxReplicas"]} == {2}  # 12 GPUs, 40 cores
    (worker,) = group["template"]["spec"]["containers"]
    assert worker["image"] == "my/meshrl:1"
    assert worker["resources"]["limits"] == {"cpu": "32", "memory": "32Gi", "nvidia.com/gpu": "8"}
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    for pod in (head["template"]["spec"], group["template"]["spec"]):
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert {each["name"] for each in pod["volumes"]} == mounts.keys()
        assert sorted(mounts.values()) == ["/dev/shm", "/etc/meshrl", "/shared"]  # noqa: S108 -- the pod's
        (claim,) = [each for each in pod["volumes"] if "persistentVolumeClaim" in each]
        assert claim["persistentVolumeClaim"] == {"claimName": "shared"}
    group["replica"] = group.pop("replicas")
    with pytest.raises(jsonschema.ValidationError, match="'replica' was unexpected"):
        checked(job)  # so the schema is one that can fail


def test_a_mesh_without_gpus_asks_for_none(config: Path) -> None:
    config.write_text(CONFIG.format(gpus=0, share=0))
    _, job = written(config, *VOLUME)
    checked(job)
    assert "nvidia.com/gpu" not in json.dumps(job)


def test_bad_input_is_told_before_anything_is_written(config: Path) -> None:
    cases = {
        ("--volume", "shared:/shared"): "is on no volume and is lost when its pod ends",
        ("--volume", "shared"): "--volume shared: write CLAIM:PATH",
        (*VOLUME, "--gpus-per-worker", "4", "--workers", "2"): "the meshes need 5 nodes of this size, but only 2 are",
        (*VOLUME, "--cpus-per-worker", "2"): "a rank of the mesh 'train' asks for 4 CPU and 1 GPU, and a node has 2",
        (*VOLUME, "run.meshes.train.custom.highmem=1"): "custom asks for highmem = 1, and nodes that",
        (*VOLUME, "run.engine=ray"): "run.engine=ray: `meshrl launch` chooses the engine",
        (*VOLUME, "stepz=3"): "did you mean",
    }
    for arguments, told in cases.items():
        assert told in refused(*command(config, *arguments))
        assert not Path("mine.yaml").exists()
    config.with_name("large.py").write_text("#" * 1_100_000)
    assert "a ConfigMap holds 1,000,000" in refused(*command(config, *VOLUME))


TEXTS = st.one_of(
    st.text(max_size=20), st.text("ab \n:#-'\"", max_size=20), st.text("ab\n", min_size=3).map(lambda t: t + "\n")
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.booleans()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_yaml_is_read_back_as_it_was(value: object) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


def test_so_many_nodes_have_room() -> None:
    cases: list[tuple[list[Need], int, int | None, int]] = [
        ([Need("a", 8, 1, 1)], 8, None, 1),
        ([Need("a", 8, 1, 1), Need("b", 1, 1, 0.5)], 8, None, 2),
        ([Need("a", 3, 1, 2)], 3, None, 3),  # two GPUs of a rank are on one node
        ([Need("a", 4, 1, 0.5)], 2, None, 1),
        ([Need("a", 3, 1, 0.6)], 2, None, 2),  # a share does not lie across two GPUs
        ([Need("a", 8, 4, 1)], 8, 16, 2),
        ([Need("a", 5, 1, 0)], 0, None, 1),
        ([Need("a", 2, 1, 1, {"accelerator_type:H100": 0.001})], 8, 16, 1),  # Ray itself gives it to a node
        ([], 0, 1, 1),
    ]
    for needs, gpus, cpus, nodes in cases:
        assert (nodes_for(needs, gpus, cpus), needs) == (nodes, needs)


def batch(config: Path, *arguments: str) -> str:
    done("launch", "slurm", str(config), *arguments)
    return Path("mine.sbatch").read_text()


def test_a_script_asks_for_what_the_meshes_need(config: Path) -> None:
    lines = batch(config, "steps=3", "--sbatch=--partition=gpu", "--sbatch=--time=1:00").splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert asked >= {"--nodes=2", "--gpus-per-node=8", "--exclusive", "--partition=gpu", "--time=1:00"}
    assert lines[0] == "#!/bin/bash"
    assert lines[-1].endswith(f'meshrl run {config} steps=3 run.engine="$IP:$PORT"')
    odd = config.rename(config.with_name("my $HOME config.toml"))
    assert f"meshrl run '{odd}' run.engine=" in batch(odd)


@pytest.mark.parametrize("cores", [None, 16])
def test_each_step_has_the_cores_of_its_node(config: Path, monkeypatch: pytest.MonkeyPatch, cores: int | None) -> None:
    batch(config, *([f"--cpus-per-node={cores}"] if cores else []))
    steps = config.with_name("steps")
    began = f"until [ $(grep -c ^--overlap {steps}) -ge 4 ]; do sleep .05; done"  # Ray starts in the background
    own = "echo 127.0.1.1; echo '127.0.1.1 10.0.0.1 fe80::1'"  # as Debian has them
    answers = f"case $* in *--ip-address*) {own} ;; *ray.nodes*) {began}; echo 2 ;; esac"
    for name, line in {"srun": f'echo "$*" >> {steps}; {answers}', "scontrol": "echo node1"}.items():
        config.with_name(name).write_text(f"#!/bin/sh\n{line}\n")
        config.with_name(name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{config.parent}:{os.environ['PATH']}")
    for name in ("JOB_ID=7", "JOB_NODELIST=node[1-2]", "NNODES=2", *([f"CPUS_PER_TASK={cores}"] if cores else [])):
        monkeypatch.setenv(*f"SLURM_{name}".split("=", 1))
    subprocess.run(["bash", "mine.sbatch"], check=True)  # noqa: S607
    said = [line for line in steps.read_text().splitlines() if line.startswith("--overlap")]
    assert "--node-ip-address=10.0.0.1 " in steps.read_text()
    assert len(said) == 5  # the address, Ray's head, the other node, their count, the run
    assert all(("--cpus-per-task=16" in line) == bool(cores) for line in said)


def test_bad_input_to_slurm_is_told_before_anything_is_written(config: Path) -> None:
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


# In Python's place: it describes a host, or writes down what is to run.
PYTHON = """#!/bin/sh
case "$2" in
    *meshrl-probe*) echo 'meshrl-probe [[], "10.0.0.1", 2, 0]' ;;
    *) printf '<%s>\n' "$@" "$(pwd)" "$RAY_AUTH_MODE ${#RAY_AUTH_TOKEN}" > told; exit 7 ;;
esac
"""


@pytest.mark.parametrize("shell", [each for each in ("sh", "bash", "zsh", "fish", "tcsh") if shutil.which(each)])
def test_each_login_shell_runs_a_command_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    folder = tmp_path / "it's mine! $HOME"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, text in {"python": PYTHON, "ssh": f'#!/bin/sh\nexec {shutil.which(shell)} -c "$2"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    odd = "task.prompt=\\'It's\\n \"so\"!\nand $HOME!"
    with SshCluster(["one"], ssh=str(tmp_path / "ssh"), python=str(tmp_path / "python")) as cluster:
        assert cluster.machines == [("one", "10.0.0.1", 2, 0)]
        assert cluster.run([odd]) == 7
    told = (folder / "told").read_text()
    assert f"<run>\n<{odd}>\n<run.engine=10.0.0.1:6379>\n<{folder}>\n<token 64>\n" in told


def test_ssh_gives_up_a_host_that_is_silent() -> None:
    if shutil.which("ssh") is None:
        pytest.skip("there is no ssh on this machine")
    shown = subprocess.run([*SSH.split(), "-G", "one"], capture_output=True, text=True, check=True).stdout
    assert {"serveraliveinterval 30", "serveralivecountmax 4", "batchmode yes"} <= {*shown.splitlines()}
