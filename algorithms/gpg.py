"""GPG: group policy gradient (Chu et al. 2025, arXiv:2504.02546).

Draw a group of completions for each prompt; the advantage is how much better the reward is than the group's mean, made
larger where groups of equal rewards teach nothing; raise each token's log-probability by it. No clip, no reference.

    meshrl run gpg/quickstart
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
    publish,
    rescaled_advantages,
    rollouts,
)


class GpgConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `loss.kl` is above 0."""
    sampling: GroupSampling = GroupSampling()
    loss: ReinforceLoss = ReinforceLoss(normalise="token-mean")
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def gpg(run: Run, config: GpgConfig) -> None:
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
            batch = await batch.load("rewards", "groups")
            advantages = rescaled_advantages(batch.rewards, batch.groups)
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
