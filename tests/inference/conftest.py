"""Tests of the backends of inference engines, each on its real engine: skipped where that is not installed."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import pytest_asyncio

from meshrl import Gather, NewModel, PolicyConfig, SamplerConfig, endpoint
from meshrl.roles import with_options
from meshrl_inference.sampler import EngineSampler
from meshrl_sglang.sampler import SglangSampler
from meshrl_torch.train.one_rank import TorchPolicy
from meshrl_vllm.sampler import VllmSampler

ROOT = Path(__file__).parents[2]
SAMPLERS: dict[str, type[EngineSampler]] = {"vllm": VllmSampler, "sglang": SglangSampler}
TEMPLATE = "{% for message in messages %}{{ message.content }}{{ '>' if message.role == 'user' else '|' }}{% endfor %}"
MODEL = NewModel(
    characters="abcdefgh >|", hidden_size=64, ffn_size=96, layers=2, heads=2, max_tokens=256, chat_template=TEMPLATE
)
"""What the engine draws from that tests share."""


class Told(EngineSampler):
    @endpoint
    async def pid(self) -> Gather[np.ndarray]:
        return np.array([self.engine_pid])


class ToldVllm(Told, VllmSampler):
    """vLLM's."""


class ToldSglang(Told, SglangSampler):
    """SGLang's."""


TOLD: dict[str, type[Told]] = {"vllm": ToldVllm, "sglang": ToldSglang}


def ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Backend(NamedTuple):
    name: str

    @property
    def sampler(self) -> type[EngineSampler]:
        return SAMPLERS[self.name]

    @property
    def python(self) -> str | None:
        """The interpreter that has the engine; None where it is this one."""
        own = environment(self.name)
        return str(own) if own.exists() else None

    def config(self, *, keys: dict[str, object] | None = None, **table: object) -> SamplerConfig:
        config = SamplerConfig.model_validate({"backend": self.name, **table})
        own = {"python": self.python, "kv_cache_mib": 32, **(keys or {})}
        return with_options(config, self.sampler.options.model_validate(own))


def environment(name: str) -> Path:
    return ROOT / f".venv-{name}" / "bin" / "python"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for name, sampler in SAMPLERS.items():
        if not environment(name).exists() and find_spec(name) is None:
            skip = pytest.mark.skip(f"{sampler.kind.title} is not installed: `make test-{name}`")
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(skip)


@pytest.fixture(scope="session", params=[pytest.param(name, marks=getattr(pytest.mark, name)) for name in SAMPLERS])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend(request.param)


@pytest.fixture(scope="session")
def held(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSampler]:
    """One for the session: no actor, made where the path of temporary files is too long for sockets.

    SGLang is asked for its weights too.
    """
    keys: dict[str, object] = {"verify_weights": True} if backend.name == "sglang" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("long" * 20)))
        sampler = backend.sampler(backend.config(model=MODEL, slots=32, keys=keys))
    yield sampler
    sampler.close()


@pytest_asyncio.fixture
async def sampler(held: EngineSampler) -> EngineSampler:
    """The same, at version 0 of the weights that it began with; calls are counted anew, of which seeds are made."""
    await held.abort()
    await held.load(await TorchPolicy(PolicyConfig(model=MODEL)).weights())
    return held
