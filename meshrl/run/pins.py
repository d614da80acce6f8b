"""Pin models and data of the hub to the commit that their name means when a run starts, on all ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from meshrl.config import Config
from meshrl.hub import Kind, Repository, pinned
from meshrl.roles import ModelConfig, PolicyConfig, ReferenceConfig, models_of
from meshrl.run.jobs import Job
from meshrl.run.tables import reads_reference
from meshrl.tasks import TaskConfig

C = TypeVar("C", bound=Config)
R = TypeVar("R", bound=Config)


def pin(job: Job[R]) -> Job[R]:
    """Replace each model and dataset of the hub by `ORG/NAME@COMMIT`. Raises ModelError or DataError like `pinned`."""
    config = _pinned(job.config, cache(pinned), compares=_compares(job.config))
    if config is job.config:
        return job
    return replace(job, config=config, resolved=job.resolved | config.model_dump(mode="json"))


def _compares(config: Config) -> bool:
    """True if the reference is read now, or by a fork with another loss. With a fake policy, only if it is read now."""
    policy: object = getattr(config, "policy", None)
    is_fake = isinstance(policy, PolicyConfig) and models_of(policy.backend) == "ignored"
    return not is_fake or reads_reference(config)


def _pinned(config: C, commit: Callable[[str, Kind], str], *, compares: bool) -> C:
    changed: dict[str, object] = {}
    for name in type(config).model_fields:
        value: object = getattr(config, name)
        if isinstance(value, Config) and (new := _pinned(value, commit, compares=compares)) is not value:
            changed[name] = new
    if isinstance(config, ModelConfig) and isinstance(model := config.model, str):
        is_read = models_of(config.backend) != "ignored" and not Path(model).exists()
        is_read = is_read and (compares or not isinstance(config, ReferenceConfig))
        if is_read and Repository.of(model):
            changed["model"] = commit(model, "model")
    if isinstance(config, TaskConfig) and config.source.startswith("hf:"):
        changed["source"] = f"hf:{commit(config.source.removeprefix('hf:'), 'dataset')}"
    return config.model_copy(update=changed) if changed else config
