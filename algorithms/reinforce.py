"""REINFORCE (Williams 1992), with the mean reward of the batch as baseline.

Draw completions; a completion's advantage is how much better its reward is than the batch's mean; raise the
log-probability of the whole completion by it. The simplest of all: no groups, no clip, no critic.

    meshrl run reinforce/quickstart
"""

from meshrl import (
    AlgorithmConfig,
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
    batch_advantages,
    evaluate,
    evaluate_during,
    publish,
    rollouts,
)


class ReinforceConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `loss.kl` is above 0."""
    sampling: Sampling = Sampling()
    loss: ReinforceLoss = ReinforceLoss()
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 512
    steps: int = 400


async def reinforce(run: Run, config: ReinforceConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    reward = await run.spawn(Reward, config.reward)
    reference = await run.spawn(Reference, config.reference) if config.loss.kl else None

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, reward.score)
    prompts = task.batches(config.prompts, run.seed)
    async with rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream:
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards")
            advantages = batch_advantages(batch.rewards)
            metrics = await policy.update(batch.assign(advantages=advantages), config.loss)
            await publish(policy, stream)
            await run.record(metrics, batch)

    after = await evaluate(sampler, task.held_out, config.sampling)
    await policy.save(str(run.folder / "model"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
    )
