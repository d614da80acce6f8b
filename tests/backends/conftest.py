from collections.abc import Callable

import pytest

from meshrl.mesh import Rank, rank_context


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Ranks take as many threads as they have cores: with one, results do not hang on the machine."""
    rank_context.set(Rank(threads=1))


@pytest.fixture(scope="session")
def model_of(random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`model_of(config)`: what `random_model` writes, in a folder of its own."""
    return lambda config, **how: random_model(config, tmp_path_factory.mktemp("model"), **how)


@pytest.fixture(scope="session")
def small(model_of: Callable[..., str]) -> str:
    from transformers import LlamaConfig  # noqa: PLC0415 -- slow to import

    from tests.backends.material import SHAPE  # noqa: PLC0415

    return model_of(LlamaConfig(**SHAPE))
