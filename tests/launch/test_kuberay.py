"""What `meshrl launch kuberay` writes, held to the schema that KubeRay gives Kubernetes."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from meshrl.run.launch import yaml_text
from tests.first_hour.terminal import done, refused
from tests.launch.conftest import CONFIG

VOLUME = ("run.folder=/shared/runs", "--volume", "shared:/shared")


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """As Kubernetes reads a part with strict validation: a field that is not there is a mistake."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        return {**schema, "additionalProperties": not schema["properties"]}
    return schema


def checked(job: Any) -> None:
    """Raises where the schema does not take it."""
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
