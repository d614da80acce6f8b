from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from meshrl import ClippedLoss, Resources
from meshrl.algo import TokenLoss
from meshrl.errors import RankFailed
from meshrl.testing import conformance
from meshrl.testing.conformance import Check, Harness, Subject, Trial, halves, numbers, refusals, state
from meshrl.testing.conformance.material import LOSS
from tests.conformance.kits import asked, keep, log_probs_of_transformers

pytestmark = pytest.mark.asyncio(loop_scope="session")

WITHOUT_A_MODEL: Sequence[Check] = [
    refusals.the_loss_of_a_critic, refusals.log_probs_of_another_model, refusals.a_column_that_is_missing,
    halves.an_update_in_halves, state.the_same_bits, state.a_cancelled_update, state.calls_at_once,
    state.roles_side_by_side, state.a_policy_goes_on, state.a_policy_made_again, *state.CRITIC, *state.REWARD_MODEL,
    *refusals.REWARD_MODEL,
]  # fmt: skip
"""What can be asked of roles that compute nothing."""


class Fragile(ClippedLoss):
    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        if float(columns["advantages"].max()) > 50:
            raise ZeroDivisionError("an advantage above 50")
        return super().__call__(logprobs, columns)


async def a_loss_that_raises(trial: Trial) -> None:
    """What a loss of one's own raises on one rank ends the update on all, which changes nothing."""
    (batch,) = await trial.batches(1)
    advantages = batch.row("advantages").copy()
    advantages[3] = 100
    policy = await trial.own.policy()
    for rows in (batch.assign(advantages=advantages), batch.assign(advantages=advantages).select([3])):
        with pytest.raises(RankFailed, match="an advantage above 50"):
            await policy.update(rows, Fragile())
    await policy.forward_backward(batch, LOSS)
    with pytest.raises(RankFailed, match=f"gradients of {len(batch)} rows .* are dropped"):
        await policy.forward_backward(batch.assign(advantages=advantages), Fragile())
    with pytest.raises(RankFailed, match="nothing to step on"):
        await policy.step()
    await trial.standard(policy)


ALL: Sequence[Check] = [
    *conformance.CHECKS,
    *conformance.REWARD_MODEL,
    *conformance.ADAPTERS,
    a_loss_that_raises,
    log_probs_of_transformers,
]
GROUPED: Sequence[Check] = [
    *numbers.POLICY[3:5], numbers.uneven_rows, *numbers.CRITIC, *conformance.REFERENCE, state.weights, state.saving,
    log_probs_of_transformers,
]  # fmt: skip
"""What is asked with fewer heads of keys than of queries, and a head of the model's own."""

ALONE: Sequence[Check] = [
    *numbers.POLICY[3:5], numbers.token_advantages, numbers.encoding, state.a_new_model,
    refusals.the_loss_of_a_critic, refusals.log_probs_of_another_model, refusals.a_column_that_is_missing,
    refusals.a_column_that_does_not_fit, refusals.what_a_critic_refuses, refusals.what_a_reward_model_refuses,
]  # fmt: skip
"""What one rank shows as well as two."""

ITSELF: Sequence[Check] = [
    *numbers.POLICY[:8], numbers.uneven_rows, numbers.log_probs, numbers.encoding, numbers.low_rank_adapters,
    state.a_new_model,
]  # fmt: skip
"""What compares the plain backend with itself. Each loss follows its equation in tests/algo."""

AXIS: Sequence[Check] = [
    numbers.uneven_rows, halves.any_number_of_calls, *numbers.CRITIC[1:], *numbers.REFERENCE[1:],
    numbers.low_rank_adapters, state.saving,
]  # fmt: skip
"""What hangs on how a model is divided."""

MIXED: Sequence[Check] = [
    log_probs_of_transformers, numbers.uneven_rows, state.a_policy_goes_on, state.saving, numbers.critic_updates,
]  # fmt: skip
REPLICATE = {"fsdp": {"replicate": 2}}
TP = Subject("fsdp", {"dp": 1, "tp": 2}, "processes")
DP = Subject("fsdp", {"dp": 2}, "processes")
CASES = [
    *asked(Subject("fake"), WITHOUT_A_MODEL),
    *asked(Subject("torch"), [check for check in ALL if check not in ITSELF], ALL),
    *asked(Subject("torch"), [], GROUPED, "grouped"),
    *asked(DP, [check for check in ALL if check not in (*ALONE, *numbers.POLICY[:2])], ALL),
    *asked(replace(DP, keys=REPLICATE), [], ALL),
    *asked(
        replace(DP, keys={"fsdp": {"gradient_sync": "last", "prefetch": 1}}),
        [halves.any_number_of_calls, state.a_policy_goes_on],
        ALL,
    ),
    *asked(TP, AXIS, ALL),
    *asked(TP, [], GROUPED, "grouped"),
    *asked(replace(DP, axes={"dp": 2, "tp": 2}), MIXED[:3], MIXED, "grouped"),
    *asked(replace(DP, axes={"dp": 4}, keys=REPLICATE), MIXED[1:4], MIXED),
    *asked(replace(DP, axes={"dp": 4, "tp": 2}, keys=REPLICATE), [], MIXED, "grouped"),
]


@pytest.mark.parametrize(("harness", "model", "checks"), CASES, indirect=["harness"])
async def test_a_backend_conforms(
    harness: Harness, folder_of: Callable[[str], str | None], model: str, checks: Sequence[Check]
) -> None:
    await keep(harness, checks, folder_of(model))


TRAVELS: Sequence[Check] = [
    numbers.POLICY[0], state.weights, state.saving, state.a_cancelled_update, state.calls_at_once,
    state.roles_side_by_side, state.a_policy_goes_on, state.a_policy_made_again, state.a_reward_model_goes_on,
]  # fmt: skip
"""What another engine may change."""


@pytest.mark.wide
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
async def test_a_backend_conforms_on_ray(harness_of: Callable[[Subject], Awaitable[Harness]]) -> None:
    await keep(await harness_of(Subject("fsdp", {"dp": 2}, "ray", resources=Resources(cpus=0))), TRAVELS)
