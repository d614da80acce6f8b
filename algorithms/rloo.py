"""RLOO: REINFORCE with the mean of the others as baseline (Ahmadian et al. 2024, arXiv:2402.14740).

Draw a group of completions for each prompt; a completion's advantage is how much better its reward is than
the mean of its group's *others*; raise the log-probability of the whole completion by it. No clip and no deviation.

    meshrl run rloo/quickstart
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
    kl_columns,
    kl_metrics,
    leave_one_out,
    penalised_rewards,
    publish,
    rollouts,
)


class RlooConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `kl` or `loss.kl` is above 0."""
    sampling: GroupSampling = GroupSampling()
    loss: ReinforceLoss = ReinforceLoss()
    kl: float = 0.0
    """The weight of the KL to the reference, which a reward is lowered by."""
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def rloo(run: Run, config: RlooConfig) -> None:
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
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            if config.kl:
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "groups", *kl_columns(config.kl))
            batch = batch.assign(advantages=leave_one_out(penalised_rewards(batch, config.kl), batch.groups))
            metrics = await policy.update(batch, config.loss)
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
