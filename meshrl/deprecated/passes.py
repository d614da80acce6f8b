"""Passes of models that pages make themselves now, with the columns that losses read."""

from meshrl.data import Batch
from meshrl.objectives import preference_columns, reference_point, score_columns, step_score_metrics
from meshrl.roles import Policy, Reference, RewardModel
from meshrl.tasks import mismatched


async def with_margins(policy: Policy, reference: Reference, batch: Batch) -> Batch:
    """`preference_columns` of both models' log-probs."""
    return await preference_columns(await reference.logprobs(await policy.logprobs(batch)))


async def mismatched_kl(policy: Policy, reference: Reference, batch: Batch) -> float:
    """`reference_point` of both models' log-probs of `mismatched` rows."""
    others = await policy.encode(mismatched(await batch.load("completion")))
    return await reference_point(await reference.logprobs(await policy.logprobs(others)))


async def with_scores(model: RewardModel, batch: Batch) -> Batch:
    """`score_columns` of the model's scores."""
    return await score_columns(await model.token_scores(batch))


async def step_metrics(model: RewardModel, batch: Batch) -> dict[str, float]:
    """`step_score_metrics` of the model's scores."""
    return await step_score_metrics(await model.token_scores(batch))
