"""CISPO: clipped importance weights (MiniMax-M1, arXiv:2506.13585).

Like GRPO, but the weight of each token's gradient is clipped instead of the surrogate. So every token is learned, even
the rare ones whose ratio moves most.

    meshrl run cispo/quickstart
"""

import meshrl as rl


class CispoConfig(rl.RolloutConfig):
    loss: rl.CispoLoss = rl.CispoLoss()
    epochs: int = 1  # passes over the rows of a step
    minibatches: int = 16  # updates in an epoch. Above 1, the clip acts even with `ahead = 0`
    sampling: rl.GroupSampling = rl.GroupSampling()


async def cispo(run: rl.Run, config: CispoConfig) -> None:
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
        async for step in run.steps(config.steps):
            batch = await anext(stream)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "groups", "loss_mask")
            batch = batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups))
            parts = rl.minibatches(batch, config.epochs, config.minibatches, (run.seed, step))
            metrics = rl.Metrics.mean([await policy.update(part, config.loss) for part in parts])
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
