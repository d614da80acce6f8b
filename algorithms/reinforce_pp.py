"""REINFORCE++: the KL in the reward, and advantages over the whole batch (Hu et al. 2025, arXiv:2501.03262).

Sample completions. A token's return is the reward minus the KL to the reference from that token on. Its advantage is
the return, scaled to mean 0 and deviation 1 over all tokens of the batch. Raise better tokens, within the clip. It is
PPO without a critic.

    meshrl run reinforce_pp/quickstart
"""

import meshrl as rl


class ReinforcePpConfig(rl.RolloutConfig):
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2, anchor="trainer")
    """The loss. Set its `correction` if `ahead` is above 0: the trainer is the anchor, so the ratio begins at 1."""
    kl: float = 0.0  # weight of the KL to the reference, which is subtracted from each token's reward
    epochs: int = 1  # passes over the rows of a step
    minibatches: int = 1  # updates in an epoch. Above 1, the clip acts even with `ahead = 0`
    prompts: int = 512
    sampling: rl.Sampling = rl.Sampling()


async def reinforce_pp(run: rl.Run, config: ReinforcePpConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reward = await run.spawn(rl.Reward, config.reward)
    reference = await run.spawn(rl.Reference, config.reference) if config.kl or config.loss.kl else None

    await rl.publish(policy, sampler)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        rl.held_out(run, sampler, task.held_out, config, reward.score),
        rl.rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream,
    ):
        async for step in run.steps(config.steps):
            batch = await policy.logprobs(await anext(stream))
            if reference:
                batch = await (await reference.logprobs(batch)).load("reference_logprobs")
            batch = await batch.load("rewards", "loss_mask", "logprobs")
            referred = batch.ragged("reference_logprobs") if reference else None
            returns = rl.rewards_to_go(batch.rewards, batch.loss_mask, config.kl, batch.ragged("logprobs"), referred)
            batch = batch.assign(advantages=rl.whiten(returns, batch.loss_mask))
            parts = rl.minibatches(batch, config.epochs, config.minibatches, (run.seed, step))
            metrics = rl.Metrics.mean([await policy.update(part, config.loss) for part in parts])
            await rl.publish(policy, stream)
            await run.record(metrics, batch, **rl.kl_metrics(batch))
    await policy.save(str(run.folder / "model"))
