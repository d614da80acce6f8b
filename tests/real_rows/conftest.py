from collections.abc import Callable
from functools import cache

import pytest

from meshrl.mesh import Rank, rank_context


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    rank_context.set(Rank(threads=1))


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, random_model: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """The folder of a random model of a shape in the module's SHAPES."""

    @cache
    def made(name: str) -> str:
        return random_model(request.module.SHAPES[name], tmp_path_factory.mktemp(name))

    return made
