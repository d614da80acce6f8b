"""The vLLM sampler, on the real engine, against the suite that each sampler must pass."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from meshrl.testing.conformance import SAMPLER, Bench, Check, Subject, name_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bench(python: str | None) -> AsyncIterator[Bench]:
    keys = {"vllm": {"python": python, "kv_cache_mib": 32}}
    async with Bench(Subject("vllm", keys=keys, seconds=120, temperatures=(0.01, 2), replays=False)) as made:
        yield made


@pytest.mark.parametrize("check", SAMPLER, ids=name_of)
async def test_the_sampler_conforms(bench: Bench, check: Check) -> None:
    await bench.run(check)
