"""REINFORCE++: the KL in the reward, and advantages over the whole batch (Hu et al. 2025, arXiv:2501.03262).

Draw completions; a token's advantage is the reward less the KL to the reference from that token on, less the mean of
all tokens of the batch and over their standard deviation; raise the better tokens, within the clip. PPO, and no critic.

    meshrl run reinforce_pp/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    ClippedLoss,
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
    Sampling,
    Task,
    TaskConfig,
    evaluate,
    evaluate_during,
    kl_metrics,
    minibatches,
    publish,
    rewards_to_go,
    rollouts,
    whiten,
)


class ReinforcePpConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `kl` or `loss.kl` is above 0."""
    sampling: Sampling = Sampling()
    loss: ClippedLoss = ClippedLoss(clip=0.2, anchor="trainer")
    """With `ahead` above 0 give it a `correction`: the trainer is the anchor, so that the ratio begins at 1."""
    kl: float = 0.0
    """The weight of the KL to the reference, which each token's reward is lowered by."""
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    epochs: int = 1
    minibatches: int = 1
    """Updates an epoch, each of about as many rows; from the second on, the clip acts at `ahead = 0` too."""
    prompts: int = 512
    steps: int = 400


async def reinforce_pp(run: Run, config: ReinforcePpConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    reward = await run.spawn(Reward, config.reward)
    reference = await run.spawn(Reference, config.reference) if config.kl or config.loss.kl else None

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, reward.score)
    prompts = task.batches(config.prompts, run.seed)
    async with rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream:
        async for step in run.steps(config.steps):
            batch = await policy.logprobs(await anext(stream))
            if reference:
                batch = await (await reference.logprobs(batch)).load("reference_logprobs")
            batch = await batch.load("rewards", "loss_mask", "logprobs")
            referred = batch.ragged("reference_logprobs") if reference else None
            returns = rewards_to_go(batch.rewards, batch.loss_mask, config.kl, batch.ragged("logprobs"), referred)
            batch = batch.assign(advantages=whiten(returns, batch.loss_mask))
            parts = minibatches(batch, config.epochs, config.minibatches, (run.seed, step))
            metrics = Metrics.mean([await policy.update(part, config.loss) for part in parts])
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
