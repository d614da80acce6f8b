"""The samplers of inference engines, on the real ones, against the suite that each sampler must pass."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from meshrl.testing.conformance import SAMPLER, Check, Harness, Subject, interruptions, name_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

CASES = {
    "recompute": SAMPLER,
    "keep": (interruptions.numbers_around_a_load, interruptions.a_prompt_that_was_read_before),
}
"""By `kv_after_update`."""


@pytest_asyncio.fixture(loop_scope="module")
async def harness(
    request: pytest.FixtureRequest, backend: Any, harness_of: Callable[[Subject], Awaitable[Harness]]
) -> Harness:
    options = {"python": backend.python, "kv_cache_mib": 32, "kv_after_update": request.param}
    subject = Subject(
        backend.name,
        keys={backend.name: options},
        seconds=240,
        temperatures=backend.sampler.temperatures,
        replays=False,
    )
    return await harness_of(subject)


@pytest.mark.parametrize(
    ("harness", "check"),
    [pytest.param(way, check, id=f"{way}-{name_of(check)}") for way, checks in CASES.items() for check in checks],
    indirect=["harness"],
)
async def test_the_sampler_conforms(harness: Harness, check: Check) -> None:
    await harness.run(check)
