"""REINFORCE (Williams 1992), with the mean reward of the batch as baseline.

Sample completions. A completion's advantage is its reward minus the batch's mean. Raise the log-probability of the
whole completion by it. This is the simplest algorithm: no groups, no clip, no critic.

    meshrl run reinforce/quickstart
"""

import meshrl as rl


class ReinforceConfig(rl.RolloutConfig):
    loss: rl.ReinforceLoss = rl.ReinforceLoss()
    prompts: int = 512
    sampling: rl.Sampling = rl.Sampling()


async def reinforce(run: rl.Run, config: ReinforceConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reward = await run.spawn(rl.Reward, config.reward)
    reference = await run.spawn(rl.Reference, config.reference) if config.loss.kl else None

    await rl.publish(policy, sampler)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        rl.held_out(run, sampler, task.held_out, config, reward.score),
        rl.rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream,
    ):
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards")
            advantages = rl.batch_advantages(batch.rewards)
            metrics = await policy.update(batch.assign(advantages=advantages), config.loss)
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
