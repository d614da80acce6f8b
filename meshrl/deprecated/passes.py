"""Deprecated helpers for model passes, with the columns that losses read."""

from typing_extensions import deprecated

from meshrl.data import Batch
from meshrl.objectives import preference_columns, reference_point, score_columns, step_score_metrics
from meshrl.roles import Policy, Reference, RewardModel
from meshrl.tasks import mismatched


@deprecated("goes with meshrl 0.2: use preference_columns of both models' log-probs")
async def with_margins(policy: Policy, reference: Reference, batch: Batch) -> Batch:
    """`preference_columns` of both models' log-probs."""
    return await preference_columns(await reference.logprobs(await policy.logprobs(batch)))


@deprecated("goes with meshrl 0.2: use reference_point of both models' log-probs of mismatched rows")
async def mismatched_kl(policy: Policy, reference: Reference, batch: Batch) -> float:
    """`reference_point` of both models' log-probs of `mismatched` rows."""
    others = await policy.encode(mismatched(await batch.load("completion")))
    return await reference_point(await reference.logprobs(await policy.logprobs(others)))


@deprecated("goes with meshrl 0.2: use score_columns of the model's token_scores")
async def with_scores(model: RewardModel, batch: Batch) -> Batch:
    """`score_columns` of the model's scores."""
    return await score_columns(await model.token_scores(batch))


@deprecated("goes with meshrl 0.2: use step_score_metrics of the model's token_scores")
async def step_metrics(model: RewardModel, batch: Batch) -> dict[str, float]:
    """`step_score_metrics` of the model's scores."""
    return await step_score_metrics(await model.token_scores(batch))
