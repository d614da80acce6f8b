import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

pytest.importorskip("tinker", reason="the SDK of the Tinker API is the client of these tests")

from tests.tinker.served import served, table


@pytest.fixture(scope="module", autouse=True)
def _connections() -> Iterator[None]:
    """What the SDK leaves goes before the filter of warnings does, and not in tests of others."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def model(random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=48,
    )
    return random_model(config, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for the tests of a file."""
    with served(table(model, Path(tmp_path_factory.mktemp("served")))) as found:
        yield found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK leaves the connection open by which it reads the server's settings first."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*unclosed:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
