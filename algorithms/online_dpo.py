"""Online DPO: direct preference optimisation on the policy's own completions (arXiv:2402.04792).

Draw several completions for each prompt and judge them; the best and the worst are a pair; raise the policy's
probability of the best over the worst, against a frozen reference, as DPO does (arXiv:2305.18290).

    meshrl run online_dpo/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    PairSampling,
    Policy,
    PolicyConfig,
    PreferenceLoss,
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
    best_and_worst,
    evaluate,
    evaluate_during,
    pair_metrics,
    publish,
    rollouts,
    with_margins,
)


class OnlineDpoConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    sampling: PairSampling = PairSampling(n=4)
    loss: PreferenceLoss = PreferenceLoss()
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions, of which two are trained on."""
    steps: int = 400


async def online_dpo(run: Run, config: OnlineDpoConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    reward = await run.spawn(Reward, config.reward)
    reference = await run.spawn(Reference, config.reference)

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, reward.score)
    prompts = task.batches(config.prompts, run.seed)
    async with rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream:
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            pairs = best_and_worst(await batch.load("rewards", "groups"))
            pairs = await with_margins(policy, reference, pairs)
            metrics = await policy.update(pairs, config.loss)
            await publish(policy, stream)
            await run.record(metrics, batch, **pair_metrics(pairs))

    after = await evaluate(sampler, task.held_out, config.sampling)
    await policy.save(str(run.folder / "model"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
    )
