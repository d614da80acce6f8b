"""The Megatron backend in every kind of layout, against the suite that each backend must pass."""

from collections.abc import Iterable, Sequence
from importlib import import_module

import pytest

from meshrl import RankFailed
from meshrl.testing.conformance import (
    CHECKS,
    REWARD_MODEL,
    Check,
    Harness,
    Subject,
    checkpoints,
    judging,
    name_of,
    numbers,
    state,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.megatron, pytest.mark.timeout(300)]

import_module("meshrl_megatron.core")  # here, and not in a rank's thread while pytest parses sources too

ONE = Subject("megatron")
SPLIT = Subject("megatron", {"dp": 1, "tp": 2}, "ray")
WHOLE_STATES = Subject("megatron", {"dp": 1, "tp": 2}, "ray", {"megatron": {"sequence_parallel": False}})
PIPELINE = Subject("megatron", {"dp": 1, "pp": 2}, "ray")
DATA = Subject("megatron", {"dp": 2}, "ray")
CONTEXT = Subject("megatron", {"dp": 1, "cp": 2}, "ray")

LAYOUT: Sequence[Check] = [
    *numbers.POLICY[:3],
    numbers.micro_batches,
    numbers.uneven_rows,
    numbers.short_and_long_rows,
    numbers.log_probs,
    *numbers.CRITIC,
    *numbers.REFERENCE,
    state.weights,
    state.saving,
    state.roles_side_by_side,
    checkpoints.a_policy_goes_on,
    checkpoints.a_critic_goes_on,
]
"""What hangs on how a model is divided. The whole suite is asked of one rank, and of two that split the matrices."""

FEW: Sequence[Check] = [
    *numbers.POLICY[:1],
    numbers.uneven_rows,
    numbers.critic_updates,
    numbers.a_reference_takes_weights,
    state.weights,
    state.saving,
    checkpoints.a_policy_goes_on,
]
"""What is asked of states that are not split. tests/ray/test_megatron.py asks layouts of four ranks."""

GROUPED: Sequence[Check] = [
    numbers.POLICY[3],
    numbers.uneven_rows,
    numbers.critic_updates,
    numbers.a_reference_takes_weights,
    state.saving,
    judging.reward_model_updates,
]
"""What is asked with fewer heads of keys than of queries, and a head of the model's own."""


def asked(subject: Subject, checks: Iterable[Check], grouped: Iterable[Check] = ()) -> list[object]:
    """Of one subject, all together: so its processes are started once."""
    cases = [("small", check) for check in checks] + [("grouped", check) for check in grouped]
    return [pytest.param(subject, model, check, id=f"{subject}-{model}-{name_of(check)}") for model, check in cases]


CASES = [
    *asked(ONE, (*CHECKS, *REWARD_MODEL), GROUPED),
    *asked(SPLIT, (*CHECKS, *REWARD_MODEL), GROUPED),
    *asked(WHOLE_STATES, FEW),
    *asked(PIPELINE, (*LAYOUT, *REWARD_MODEL), GROUPED),
    *asked(DATA, LAYOUT),
    *asked(CONTEXT, LAYOUT, GROUPED),
]


@pytest.mark.parametrize(("harness", "model", "check"), CASES, indirect=["harness"])
async def test_a_layout_conforms(harness: Harness, grouped: str, model: str, check: Check) -> None:
    await harness.run(check, grouped if model == "grouped" else None)


@pytest.mark.parametrize("harness", [pytest.param(ONE, id=str(ONE))], indirect=True)
async def test_adapters_are_refused(harness: Harness) -> None:
    async with harness.trial() as trial:
        with pytest.raises(RankFailed, match=r"ConfigError: the backend 'megatron' has no adapters"):
            await trial.own.policy(lora={"rank": 4})
