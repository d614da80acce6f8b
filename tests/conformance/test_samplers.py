"""The backends that sample, against the suite that each of them must pass."""

from collections.abc import AsyncGenerator

import numpy as np
import pytest
import pytest_asyncio

from meshrl import Weights
from meshrl.testing.conformance import SAMPLER, SAMPLER_OF_NO_MODEL, Bench, Check, Subject, name_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SKILL = Weights(0, {"skill": np.array([0.5])})
SUBJECTS = [
    Subject("fake", weights=SKILL),
    Subject("fake", {"dp": 2}, weights=SKILL),
    Subject("torch"),
    Subject("torch", {"dp": 2}),
]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=SUBJECTS, ids=str)
async def bench(request: pytest.FixtureRequest) -> AsyncGenerator[Bench]:
    async with Bench(request.param) as made:
        yield made


@pytest.mark.parametrize("check", SAMPLER, ids=name_of)
async def test_a_sampler_conforms(bench: Bench, check: Check) -> None:
    if bench.subject.weights is not None and check not in SAMPLER_OF_NO_MODEL:
        return
    await bench.run(check)
