"""GSPO: group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

As GRPO, but the ratio to the old policy is that of the whole completion, to the power of one over its length, and so is
the clip: all tokens of a completion are weighed alike, as they were rewarded.

    meshrl run gspo/quickstart
"""

from meshrl import (
    AlgorithmConfig,
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
    SequenceLoss,
    Task,
    TaskConfig,
    evaluate,
    evaluate_during,
    group_advantages,
    minibatches,
    publish,
    rollouts,
)


class GspoConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `loss.kl` is above 0."""
    sampling: GroupSampling = GroupSampling()
    loss: SequenceLoss = SequenceLoss()
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    epochs: int = 1
    minibatches: int = 4
    """Updates an epoch, each of about as many rows; from the second on, the clip acts at `ahead = 0` too."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def gspo(run: Run, config: GspoConfig) -> None:
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
