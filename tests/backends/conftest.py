"""What holds for every test of a backend."""

import pytest

from meshrl.mesh import Rank, rank_context


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Ranks take as many threads as they have cores: with one, results do not hang on the machine."""
    rank_context.set(Rank(threads=1))
