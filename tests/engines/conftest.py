"""One fixture for all engines: what is tested with it holds on each."""

from collections.abc import AsyncIterator

import pytest

from meshrl import LocalEngine, Resources
from meshrl.engine import Engine


@pytest.fixture(params=["local", "by reference"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """`by reference`: the local engine, where every column stays where it was made."""
    made = LocalEngine(cores=4, inline_bytes=0) if request.param == "by reference" else LocalEngine(cores=4)
    yield made
    await made.close()


@pytest.fixture
def small() -> Resources:
    """Ranks with a thread of their own."""
    return Resources(cpus=1)
