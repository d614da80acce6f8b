"""CISPO: clipped importance weights (MiniMax-M1, arXiv:2506.13585).

As GRPO, but what is clipped is the weight of a token's gradient, not the surrogate: no token is left out, also not the
rare ones whose ratio moves most.

    meshrl run cispo/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    CispoLoss,
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
    rollouts,
)


class CispoConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `loss.kl` is above 0."""
    sampling: GroupSampling = GroupSampling()
    loss: CispoLoss = CispoLoss()
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    epochs: int = 1
    minibatches: int = 16
    """Updates an epoch, each of about as many rows; from the second on, the clip acts at `ahead = 0` too."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def cispo(run: Run, config: CispoConfig) -> None:
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
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "groups", "loss_mask")
            batch = batch.assign(advantages=group_advantages(batch.rewards, batch.groups))
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
