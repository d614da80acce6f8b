"""The backends that train, against the suite that each of them must pass."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from meshrl import ClippedLoss, RankFailed
from meshrl.losses import TokenLoss
from meshrl.testing.conformance import (
    CHECKS,
    CRITIC,
    REFERENCE,
    REWARD_MODEL,
    Check,
    Harness,
    Subject,
    Trial,
    checkpoints,
    judging,
    name_of,
    numbers,
    refusals,
    state,
)
from meshrl.testing.conformance.compare import close

pytestmark = pytest.mark.asyncio(loop_scope="session")


WITHOUT_A_MODEL = [
    refusals.the_loss_of_a_critic,
    refusals.log_probs_of_another_model,
    refusals.a_column_that_is_missing,
    state.the_same_bits,
    state.a_cancelled_update,
    state.calls_at_once,
    state.roles_side_by_side,
    checkpoints.a_policy_goes_on,
    checkpoints.a_policy_made_again,
    checkpoints.a_critic_goes_on,
    judging.a_reward_model_goes_on,
    judging.what_a_reward_model_refuses,
]
"""What can be asked of roles that compute nothing."""


@pytest.mark.parametrize("check", WITHOUT_A_MODEL, ids=name_of)
async def test_the_fakes_keep_what_needs_no_model(check: Check) -> None:
    async with Harness(Subject("fake")) as harness:
        await harness.run(check)


class Fragile(ClippedLoss):
    """Raises at one row, which one rank has."""

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
    await trial.standard(policy)


async def log_probs_of_transformers(trial: Trial) -> None:
    """`logprobs` are what transformers computes, one row at a time."""
    (batch,) = await trial.batches(1)
    scored = await (await (await trial.own.policy()).logprobs(batch)).load()
    network = AutoModelForCausalLM.from_pretrained(trial.model.folder, attn_implementation="eager")
    expected: list[np.ndarray] = []
    for tokens, temperature in zip(batch.tokens, batch.row("temperature").tolist(), strict=True):
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            logprobs = (network(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        expected += [np.zeros(1, np.float32), logprobs.gather(1, ids[1:, None])[:, 0].numpy()]
    close("log-probs", scored.ragged("logprobs").values, np.concatenate(expected), trial.tolerance)


async def adapters(trial: Trial) -> None:
    """A policy with adapters trains as one rank does, or says that its layout has none."""
    if "tp" not in trial.subject.axes:
        await numbers.low_rank_adapters(trial)
        return
    with pytest.raises(RankFailed, match="no adapters on a mesh with an axis tp"):
        await trial.own.policy(lora={"rank": 4})


OWN: Sequence[Check] = [adapters, a_loss_that_raises, log_probs_of_transformers]
GROUPED: Sequence[Check] = [
    *numbers.POLICY[3:5],
    numbers.uneven_rows,
    *CRITIC[:2],
    *REFERENCE,
    state.weights,
    state.saving,
    log_probs_of_transformers,
]
"""What is asked with fewer heads of keys than of queries, and a head of the model's own."""

LAYOUT: Sequence[Check] = [
    *numbers.POLICY[:3],
    numbers.micro_batches,
    numbers.uneven_rows,
    *CRITIC,
    *REFERENCE,
    adapters,
    state.weights,
    state.saving,
    state.the_same_bits,
    checkpoints.a_policy_goes_on,
]
"""What hangs on how a model is divided, where a layout of as many ranks is asked everything."""

TIMING: Sequence[Check] = [*numbers.POLICY[:3], numbers.micro_batches, numbers.uneven_rows, a_loss_that_raises]
"""What hangs on when ranks talk to each other."""

TRAVELS: Sequence[Check] = [
    numbers.POLICY[0],
    state.weights,
    state.saving,
    state.a_cancelled_update,
    state.calls_at_once,
    state.roles_side_by_side,
    checkpoints.a_policy_goes_on,
    judging.a_reward_model_goes_on,
]
"""What another engine may change for a backend that is asked everything on this one."""

ALL: Sequence[Check] = [*CHECKS, *REWARD_MODEL, *OWN]
ASKED: Sequence[tuple[Subject, Sequence[Check], Sequence[Check]]] = [
    (Subject("torch"), ALL, GROUPED),
    (Subject("torch", engine="ray"), TRAVELS, ()),
    (Subject("fsdp", {"dp": 2}, "ray"), ALL, ()),
    (Subject("fsdp", {"dp": 2}, "ray", {"fsdp": {"replicate": 2}}), LAYOUT, ()),
    (Subject("fsdp", {"dp": 2}, "ray", {"fsdp": {"gradient_sync": "last", "prefetch": 1}}), TIMING, ()),
    (Subject("fsdp", {"dp": 1, "tp": 2}, "ray"), [*LAYOUT, *REWARD_MODEL, *OWN[1:]], GROUPED),
]
"""By subject: what it is asked of the suite's model, and of another."""
CASES = [
    pytest.param(subject, model, check, id=f"{subject}-{model}-{name_of(check)}")
    for subject, small, grouped in ASKED
    for model, checks in (("small", small), ("grouped", grouped))
    for check in checks
]


@pytest.mark.parametrize(("harness", "model", "check"), CASES, indirect=["harness"])
async def test_a_backend_conforms(harness: Harness, grouped: str, model: str, check: Check) -> None:
    await harness.run(check, grouped if model == "grouped" else None)
