"""The Megatron backend in every kind of layout, against the suite that each backend must pass.

tests/backends/test_megatron_layouts.py has layouts beside each other, and what moves from one to another.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

import pytest

from meshrl.errors import RankFailed
from meshrl.testing import conformance
from meshrl.testing.conformance import Check, Harness, Subject, Trial, halves, numbers, state
from tests.conformance.kits import asked, keep, log_probs_of_transformers

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.megatron]

import_module("meshrl_megatron.core")  # here, and not in a rank's thread while pytest parses sources too


async def adapters_are_refused(trial: Trial) -> None:
    """A policy with adapters is refused in words."""
    with pytest.raises(RankFailed, match=r"ConfigError: the backend 'megatron' has no adapters"):
        await trial.own.policy(lora={"rank": 4})


ALL: Sequence[Check] = [*conformance.CHECKS, *conformance.REWARD_MODEL, log_probs_of_transformers, adapters_are_refused]
AXIS: Sequence[Check] = [
    numbers.uneven_rows, numbers.short_and_long_rows, halves.any_number_of_calls, numbers.critic_updates,
    numbers.a_reference_takes_weights, numbers.reward_model_updates,
]  # fmt: skip
"""What hangs on how a model is divided. The whole suite is asked of one rank, and widely of two along each axis."""
KEPT: Sequence[Check] = [state.saving, state.a_policy_goes_on]
GROUPED: Sequence[Check] = [
    numbers.POLICY[3], numbers.uneven_rows, numbers.critic_updates, numbers.a_reference_takes_weights, state.saving,
    numbers.reward_model_updates,
]  # fmt: skip
"""What is asked with fewer heads of keys than of queries, and a head of the model's own."""
EXPERTS: Sequence[Check] = [
    numbers.uneven_rows, numbers.log_probs, numbers.critic_updates, *KEPT, numbers.POLICY[0],
    numbers.a_reference_takes_weights, state.weights,
]  # fmt: skip
TOGETHER: Sequence[Check] = [
    log_probs_of_transformers, numbers.POLICY[0], state.a_policy_goes_on, halves.any_number_of_calls,
    numbers.critic_updates,
]  # fmt: skip
"""What is asked where all axes are divided at once."""


def layout(options: Mapping[str, object] | None = None, dp: int = 1, **axes: int) -> Subject:
    return Subject("megatron", {"dp": dp, **axes}, "processes", {"megatron": options} if options else {})


ONE, SHARED = Subject("megatron"), {"experts": 2}
TP, PP, CP, DP = layout(tp=2), layout(pp=2), layout(cp=2), layout(dp=2)
CASES = [
    *asked(ONE, ALL),
    *asked(ONE, GROUPED[:2], GROUPED, "grouped"),
    *asked(ONE, EXPERTS[:1], EXPERTS, "mixture"),
    *asked(TP, [*AXIS, numbers.micro_batches, state.a_policy_made_again, state.a_cancelled_update], ALL),
    *asked(TP, GROUPED[:1], GROUPED, "grouped"),
    *asked(TP, [], KEPT, "mixture"),
    *asked(PP, AXIS, ALL),
    *asked(PP, [], GROUPED, "grouped"),
    *asked(PP, [], KEPT, "mixture"),
    *asked(CP, AXIS, ALL),
    *asked(CP, [], GROUPED, "grouped"),
    *asked(DP, [*AXIS, state.a_policy_goes_on], ALL),
    *asked(layout(SHARED, dp=2), EXPERTS[:5], EXPERTS, "mixture"),
    *asked(layout({"sequence_parallel": False}, tp=2), KEPT, AXIS),
    *asked(layout(pp=2, tp=2), [], AXIS),
    *asked(layout(SHARED, dp=2, tp=2), [], EXPERTS, "mixture"),
    *asked(layout(SHARED, dp=2, pp=2, tp=2), TOGETHER[:3], TOGETHER, "mixture"),
    *asked(layout(pp=2, cp=2), [log_probs_of_transformers, numbers.POLICY[0]]),
    *asked(layout(SHARED, dp=2, pp=2, cp=2, tp=2), [], [*TOGETHER, *EXPERTS], "mixture"),
]


@pytest.mark.parametrize(("harness", "model", "checks"), CASES, indirect=["harness"])
async def test_a_layout_conforms(
    harness: Harness, folder_of: Callable[[str], str | None], model: str, checks: Sequence[Check]
) -> None:
    await keep(harness, checks, folder_of(model))
