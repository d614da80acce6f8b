"""Expert iteration: rejection sampling fine-tuning (RAFT, arXiv:2304.06767; ReST, arXiv:2308.08998).

Draw a group of completions for each prompt, keep those whose reward is good enough, and maximise their likelihood:
supervised fine-tuning on the policy's own best answers. A step that keeps none changes nothing.

    meshrl run expert_iteration/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    CrossEntropy,
    Metrics,
    Policy,
    PolicyConfig,
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
    publish,
    rollouts,
)


class ExpertIterationConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    sampling: Sampling = Sampling(n=8)
    loss: CrossEntropy = CrossEntropy()
    at_least: float = 1.0
    """The reward from which on a completion is kept."""
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def expert_iteration(run: Run, config: ExpertIterationConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    reward = await run.spawn(Reward, config.reward)

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, reward.score)
    prompts = task.batches(config.prompts, run.seed)
    async with rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream:
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            batch = await batch.load("rewards")
            kept = batch.select(batch.rewards >= config.at_least).drop("temperature")  # likelihood as at temperature 1
            metrics = await policy.update(kept, config.loss) if len(kept) else Metrics.of()
            await publish(policy, stream)
            await run.record(metrics, batch, kept=len(kept) / len(batch))

    after = await evaluate(sampler, task.held_out, config.sampling)
    await policy.save(str(run.folder / "model"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
    )
