"""What algorithms do with a sampler: draw rollouts, give it new weights, measure it."""

from math import nan
from typing import cast

import numpy as np

from meshrl.data import Batch
from meshrl.errors import DataError
from meshrl.rewards import exact_match
from meshrl.roles import Policy, Sampler, Sampling
from meshrl.weights import Weights


async def rollout(sampler: Sampler, prompts: Batch, sampling: Sampling) -> Batch:
    """All rollouts of the prompts, in their order: the `sampling.n` completions of a prompt stand together."""
    tagged = prompts.part(np.arange(len(prompts)))
    chunks = [chunk async for chunk in sampler.generate(tagged, sampling)]
    done = Batch.join(chunks)
    if len(done) != len(prompts) * sampling.n:
        raise DataError(
            f"the sampler returned {len(done)} rollouts for {len(prompts)} prompts x {sampling.n} completions"
        )
    return done


async def publish(policy: Policy, *samplers: Sampler) -> Weights:
    """Give the samplers the policy's weights; returns them. Later tokens carry their version."""
    weights = await policy.weights()
    for sampler in samplers:
        await sampler.load(weights)
    return weights


async def evaluate(sampler: Sampler, prompts: Batch, sampling: Sampling) -> dict[str, float]:
    """Exact match on held-out prompts, one completion each: `greedy`, and `sampled` at the temperature.

    NaN where there are no prompts.
    """
    if not len(prompts):
        return {"greedy": nan, "sampled": nan}
    greedy = await rollout(sampler, prompts, sampling.model_copy(update={"n": 1, "temperature": 0.0}))
    sampled = await rollout(sampler, prompts, sampling.model_copy(update={"n": 1}))
    return {"greedy": await _exact_match(greedy), "sampled": await _exact_match(sampled)}


async def _exact_match(batch: Batch) -> float:
    batch = await batch.load("completion", "answer")
    pairs = zip(batch.objects("completion"), batch.objects("answer"), strict=True)
    return float(np.mean([exact_match("", cast("str", one), {"answer": other}) for one, other in pairs]))
