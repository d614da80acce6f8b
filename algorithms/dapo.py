"""DAPO: decoupled clip and dynamic sampling (Yu et al. 2025, arXiv:2503.14476).

As GRPO, with four changes: the upper bound of the clip is wider, prompts whose completions are all right or all wrong
are replaced by others, each token weighs the same, and completions near the most tokens lose some reward.

    meshrl run dapo/quickstart
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
    has_signal,
    minibatches,
    overlong_penalty,
    publish,
    rollouts,
)


class DapoConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `loss.kl` is above 0."""
    sampling: GroupSampling = GroupSampling()
    loss: ClippedLoss = ClippedLoss(clip=0.2, clip_high=0.28)
    overlong: int = 0
    """The last so many of `sampling.max_tokens` cost up to 1 of the reward; 0: they cost nothing."""
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    epochs: int = 1
    minibatches: int = 16
    """Updates an epoch, each of about as many rows; from the second on, the clip acts at `ahead = 0` too."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def dapo(run: Run, config: DapoConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    reward = await run.spawn(Reward, config.reward)
    reference = await run.spawn(Reference, config.reference) if config.loss.kl else None

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, reward.score)
    prompts = task.batches(config.prompts, run.seed)
    drawn = rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score, keep=has_signal)
    async with drawn as stream:
        async for step in run.steps(config.steps):
            batch = await anext(stream)
            if config.loss.anchor == "trainer":
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "groups", "loss_mask")
            lengths = [mask.sum() for mask in batch.loss_mask]
            rewards = batch.rewards + overlong_penalty(lengths, config.sampling.max_tokens, config.overlong)
            batch = batch.assign(advantages=group_advantages(rewards, batch.groups))
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
