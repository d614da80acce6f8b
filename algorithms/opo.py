"""OPO: on-policy REINFORCE with the baseline of least variance (Hao et al. 2025, arXiv:2505.23585).

Draw a group of completions for each prompt; the baseline is the group's mean reward, where a completion counts as often
as it has tokens; raise the log-probability of the better completions. Keep `ahead = 0`: it is exactly on-policy.

    meshrl run opo/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    GroupSampling,
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
    Task,
    TaskConfig,
    evaluate,
    evaluate_during,
    optimal_advantages,
    publish,
    rollouts,
)


class OpoConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `loss.kl` is above 0."""
    sampling: GroupSampling = GroupSampling()
    loss: ReinforceLoss = ReinforceLoss()
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def opo(run: Run, config: OpoConfig) -> None:
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
            batch = await batch.load("rewards", "groups", "loss_mask")
            lengths = [mask.sum() for mask in batch.loss_mask]
            advantages = optimal_advantages(batch.rewards, batch.groups, lengths)
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
