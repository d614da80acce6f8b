"""ReMax: REINFORCE with the reward of the greedy completion as baseline (Li et al. 2023, arXiv:2310.10505).

Draw a completion of each prompt, and the greedy one beside it; the advantage is how much better the first one's reward
is; raise the log-probability of the whole completion by it. The baseline is the prompt's own without a group or critic.

    meshrl run remax/quickstart
"""

import numpy as np

from meshrl import (
    AlgorithmConfig,
    Batch,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    ReinforceLoss,
    Reward,
    RewardConfig,
    RewardModelConfig,
    Run,
    Sampler,
    SamplerConfig,
    Sampling,
    Task,
    TaskConfig,
    evaluate,
    evaluate_during,
    greedy_baseline,
    kl_columns,
    kl_metrics,
    penalised_rewards,
    publish,
    rollouts,
)


class RemaxConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `kl` or `loss.kl` is above 0."""
    sampling: Sampling = Sampling()
    loss: ReinforceLoss = ReinforceLoss()
    kl: float = 0.0
    """The weight of the KL to the reference, which a reward is lowered by."""
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 256
    steps: int = 400


async def remax(run: Run, config: RemaxConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    reward = await run.spawn(Reward, config.reward)
    reference = await run.spawn(Reference, config.reference) if config.kl or config.loss.kl else None

    async def score(batch: Batch) -> Batch:
        return await greedy_baseline(sampler, await reward.score(batch), config.sampling, reward.score)

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, reward.score)
    prompts = task.batches(config.prompts, run.seed)
    async with rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=score) as stream:
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            if config.kl:
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "baseline", *kl_columns(config.kl))
            advantages = penalised_rewards(batch, config.kl) - np.asarray(batch.row("baseline"), np.float32)
            metrics = await policy.update(batch.assign(advantages=advantages), config.loss)
            await publish(policy, stream)
            await run.record(metrics, batch, **kl_metrics(batch))

    after = await evaluate(sampler, task.held_out, config.sampling)
    await policy.save(str(run.folder / "model"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
    )
