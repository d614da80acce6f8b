from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from meshrl.testing.conformance import SAMPLER, Check, Harness, Subject, draws, interruptions, rows
from tests.conformance.kits import keep

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(3000)]

COVERING: Sequence[Check] = [
    draws.greedy, draws.sampler_log_probs, draws.restricted_draws, draws.seeds, draws.completions_of_a_prompt,
    rows.columns, rows.few_rows, rows.more_rows_than_slots, rows.ends_of_rows, rows.stop_texts, rows.rows_that_go_on,
    interruptions.a_cancelled_call, interruptions.an_abort, interruptions.numbers_around_a_load,
    interruptions.a_prompt_that_was_read_before, interruptions.weights_of_another_model, interruptions.a_replay,
]  # fmt: skip
CASES: Mapping[str, tuple[str, Sequence[Check]]] = {
    "covering": ("recompute", COVERING),
    "others": ("recompute", [check for check in SAMPLER if check not in COVERING]),
    "keep": ("keep", [interruptions.numbers_around_a_load, interruptions.a_prompt_that_was_read_before]),
}
"""The checks of a test, and its `kv_after_update`."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.wide] * (case == "others")) for case in CASES])
async def test_a_sampler_conforms(backend: Any, harness_of: Callable[[Subject], Awaitable[Harness]], case: str) -> None:
    way, checks = CASES[case]
    options = {"python": backend.python, "kv_cache_mib": 32, "kv_after_update": way}
    keys, temperatures = {backend.name: options}, backend.sampler.temperatures
    subject = Subject(backend.name, keys=keys, temperatures=temperatures, replays=False)
    await keep(await harness_of(subject), checks)
