"""Manifests for KubeRay: a RayJob whose cluster fits the meshes, and a ConfigMap with the configuration."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from meshrl.errors import ConfigError
from meshrl.run.launch.needs import Need, enough_nodes

_FOLDER: Final = "/etc/meshrl"
"""The folder of the configuration in the pods."""
_ROOM: Final = 1_000_000
"""Capacity of a ConfigMap in bytes."""


@dataclass(frozen=True)
class Pods:
    """The image and resources of a cluster's pods."""

    image: str
    """Must contain meshrl, its backends and what the script needs."""
    gpus: int = 8
    """GPUs of a worker, if a mesh asks for GPUs."""
    cpus: int = 8
    """CPUs of a worker."""
    memory: str = "32Gi"
    """Memory of a worker, in Kubernetes notation. Up to half of it may be shared memory."""
    workers: int | None = None
    """Number of workers. None: as many as the meshes need."""
    volumes: Mapping[str, str] | None = None
    """Mount point of each volume claim, for models, data and the runs' folder."""
    namespace: str | None = None


def ray_job(
    name: str, arguments: Sequence[str], needs: Sequence[Need], pods: Pods, files: Mapping[str, str]
) -> list[dict[str, object]]:
    """Return the documents for `kubectl apply`: a ConfigMap with `files`, and a RayJob of `meshrl run ARGUMENTS`.

    The arguments refer to these files by name. Raises `ConfigError` if the workers have no room for the meshes.
    """
    named = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:40].rstrip("-") or "meshrl"
    gpus = pods.gpus if any(need.gpus for need in needs) else 0
    workers = enough_nodes(needs, pods.workers, gpus, pods.cpus)
    if (size := sum(len(text.encode()) for text in files.values())) > _ROOM:
        raise ConfigError(
            f"the configuration and the Python files next to it have {size:,} bytes, and a ConfigMap holds {_ROOM:,}: "
            "put large files into the image or on a volume"
        )
    namespace = {"namespace": pods.namespace} if pods.namespace else {}
    command = f"meshrl run {shlex.join(arguments)} run.engine=auto"
    entry = f"cd {_FOLDER} && exec {command}" if files else command
    claims = _volumes(named, pods, has_files=bool(files))
    worker = {"cpu": str(pods.cpus), "memory": pods.memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    job: dict[str, object] = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": named, **namespace},
        "spec": {
            "entrypoint": f"bash -c {shlex.quote(entry)}",
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "authOptions": {"mode": "token"},
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "num-gpus": "0"},
                    "template": _pod("ray-head", pods.image, {"cpu": "4", "memory": "16Gi"}, claims),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        # Start all at once, because a mesh that the present nodes could never hold is refused.
                        "replicas": workers,
                        "minReplicas": workers,
                        "maxReplicas": workers,
                        "rayStartParams": {},
                        "template": _pod("ray-worker", pods.image, worker, claims),
                    }
                ],
            },
        },
    }
    metadata = {"name": f"{named}-config", **namespace}
    config: dict[str, object] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(files)}
    return [config, job] if files else [job]


def files_beside(config: Path) -> dict[str, str]:
    """Read a configuration and the Python files in its folder, by their names."""
    return {path.name: path.read_text("utf-8") for path in [config, *sorted(config.parent.glob("*.py"))]}


def _volumes(name: str, pods: Pods, *, has_files: bool) -> list[tuple[dict[str, object], str]]:
    volumes: list[tuple[dict[str, object], str]] = [
        ({"name": "shared-memory", "emptyDir": {"medium": "Memory"}}, "/dev/shm")  # noqa: S108 -- the pod's
    ]
    if has_files:
        volumes.append(({"name": "meshrl-config", "configMap": {"name": f"{name}-config"}}, _FOLDER))
    for number, (claim, place) in enumerate((pods.volumes or {}).items()):
        volumes.append(({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}, place))
    return volumes


def _pod(
    name: str, image: str, has: Mapping[str, str], volumes: Sequence[tuple[dict[str, object], str]]
) -> dict[str, object]:
    return {
        "spec": {
            "containers": [
                {
                    "name": name,
                    "image": image,
                    "resources": {"requests": dict(has), "limits": dict(has)},
                    "volumeMounts": [{"name": str(volume["name"]), "mountPath": place} for volume, place in volumes],
                }
            ],
            "volumes": [volume for volume, _ in volumes],
        }
    }


def yaml_text(value: object, indent: str = "") -> str:
    """Write mappings, sequences, texts, numbers and booleans. A text of several lines becomes a block."""
    if isinstance(value, Mapping) and value:
        pairs = cast("Mapping[str, object]", value).items()
        return "".join(f"{indent}{_key(key)}:{_yaml_value(each, indent)}" for key, each in pairs)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return "".join(f"{indent}-{_yaml_value(each, indent)}" for each in cast("Sequence[object]", value))
    return f"{indent}{_scalar(value)}\n"


def _yaml_value(value: object, indent: str) -> str:
    """Write a value that follows a key or a dash."""
    inner = indent + "  "
    if isinstance(value, str) and _is_block(value):
        lines = value.split("\n")[:-1]
        return " |\n" + "".join(f"{inner}{line}\n" if line else "\n" for line in lines)
    if value and isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return "\n" + yaml_text(cast("object", value), inner)
    return f" {_scalar(value)}\n"


def _scalar(value: object) -> str:
    """Write a scalar as JSON, except characters with two escapes there, which YAML does not join."""
    if not isinstance(value, str):
        return json.dumps(value)
    letters = (json.dumps(each)[1:-1] if ord(each) < 1 << 16 else f"\\U{ord(each):08x}" for each in value)
    return f'"{"".join(letters)}"'


def _key(key: str) -> str:
    """Quote a key that YAML might not read as text."""
    is_plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]{3,}", key) and key.lower() not in ("true", "false", "null")
    return key if is_plain else _scalar(key)


def _is_block(text: str) -> bool:
    """True if YAML reads the text back unchanged as a block."""
    lines = text.split("\n")
    plain = all(line.isprintable() and line == line.rstrip() for line in lines)
    return len(lines) > 2 and not lines[-1] and bool(lines[-2]) and plain and not text.startswith((" ", "\n"))
