"""Expert iteration: rejection sampling fine-tuning (RAFT, arXiv:2304.06767; ReST, arXiv:2308.08998).

Sample a group of completions for each prompt, keep those with a high enough reward, and maximise their likelihood. This
is supervised fine-tuning on the policy's own best answers. A step that keeps none changes nothing.

    meshrl run expert_iteration/quickstart
"""

import meshrl as rl


class ExpertIterationConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    reward: rl.RewardConfig | rl.RewardModelConfig
    sampling: rl.Sampling = rl.Sampling(n=8)
    loss: rl.CrossEntropy = rl.CrossEntropy()
    min_reward: float = 1.0
    """Lowest reward of the completions that are kept."""
    ahead: int = 0
    """Published weight versions that rollouts may be behind. Above 0, rollouts run while the policy trains."""
    prompts: int = 64
    """Prompts in a step. Each has `sampling.n` completions."""
    steps: int = 400  # training steps


async def expert_iteration(run: rl.Run, config: ExpertIterationConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reward = await run.spawn(rl.Reward, config.reward)

    await rl.publish(policy, sampler)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        rl.held_out(run, sampler, task.held_out, config, reward.score),
        rl.rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream,
    ):
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            batch = await batch.load("rewards")
            kept = batch.select(batch.rewards >= config.min_reward).drop("temperature")  # likelihood at temperature 1
            metrics = await policy.update(kept, config.loss) if len(kept) else rl.Metrics.of()
            await rl.publish(policy, stream)
            await run.record(metrics, batch, kept=len(kept) / len(batch))
    await policy.save(str(run.folder / "model"))
