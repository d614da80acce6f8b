"""REINFORCE++ with baseline: GRPO, but scaled over the whole batch (Hu et al. 2025, arXiv:2501.03262).

Draw a group of completions for each prompt; a completion's advantage is how much better its reward is than its group's
mean, over the standard deviation of all tokens of the batch, which few equal rewards cannot make small.

    meshrl run reinforce_pp_baseline/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    ClippedLoss,
    GroupSampling,
    Metrics,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
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
    group_advantages,
    minibatches,
    publish,
    rewards_to_go,
    rollouts,
    whiten,
)


class ReinforcePpBaselineConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `loss.kl` is above 0."""
    sampling: GroupSampling = GroupSampling()
    loss: ClippedLoss = ClippedLoss(clip=0.2, kl_estimator="k2")
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    epochs: int = 1
    minibatches: int = 1
    """Updates an epoch, each of about as many rows; from the second on, the clip acts at `ahead = 0` too."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def reinforce_pp_baseline(run: Run, config: ReinforcePpBaselineConfig) -> None:
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
        async for step in run.steps(config.steps):
            batch = await anext(stream)
            if config.loss.anchor == "trainer":
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "groups", "loss_mask")
            centred = group_advantages(batch.rewards, batch.groups, scale="none")
            batch = batch.assign(advantages=whiten(rewards_to_go(centred, batch.loss_mask), batch.loss_mask))
            parts = minibatches(batch, config.epochs, config.minibatches, (run.seed, step))
            metrics = Metrics.mean([await policy.update(part, config.loss) for part in parts])
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
