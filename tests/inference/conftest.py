"""Tests of the backends of inference engines, each on its real engine: skipped where that is not installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from meshrl import SamplerConfig, with_options
from meshrl_inference.options import EngineOptions
from meshrl_inference.sampler import EngineSampler
from meshrl_sglang.sampler import SglangSampler
from meshrl_vllm.sampler import VllmSampler

ROOT = Path(__file__).parents[2]
SAMPLERS: dict[str, type[EngineSampler]] = {"vllm": VllmSampler, "sglang": SglangSampler}


class Backend(NamedTuple):
    """A backend, and where its engine is."""

    name: str

    @property
    def sampler(self) -> type[EngineSampler]:
        return SAMPLERS[self.name]

    @property
    def title(self) -> str:
        return self.sampler.kind.title

    @property
    def python(self) -> str | None:
        """The interpreter that has the engine; None where it is this one."""
        own = environment(self.name)
        return str(own) if own.exists() else None

    def options(self, **keys: object) -> EngineOptions:
        return self.sampler.options.model_validate({"python": self.python, "kv_cache_mib": 32, **keys})

    def config(self, *, keys: dict[str, object] | None = None, **table: object) -> SamplerConfig:
        """The table of a sampler, with further options of the backend."""
        config = SamplerConfig.model_validate({"backend": self.name, **table})
        return with_options(config, self.options(**(keys or {})))


def environment(name: str) -> Path:
    """The interpreter of the environment that `make test-...` makes."""
    return ROOT / f".venv-{name}" / "bin" / "python"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for name, sampler in SAMPLERS.items():
        if not environment(name).exists() and find_spec(name) is None:
            skip = pytest.mark.skip(f"{sampler.kind.title} is not installed: `make test-{name}`")
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(skip)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in SAMPLERS])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)
