"""REINFORCE++ with baseline: GRPO, but scaled over the whole batch (Hu et al. 2025, arXiv:2501.03262).

Sample a group of completions for each prompt. A completion's advantage is its reward minus the group's mean, divided by
the standard deviation over all tokens of the batch. A few equal rewards cannot make that deviation small.

    meshrl run reinforce_pp_baseline/quickstart
"""

import meshrl as rl


class ReinforcePpBaselineConfig(rl.RolloutConfig):
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2, kl_estimator="k2")
    epochs: int = 1  # passes over the rows of a step
    minibatches: int = 1  # updates in an epoch. Above 1, the clip acts even with `ahead = 0`
    sampling: rl.GroupSampling = rl.GroupSampling()


async def reinforce_pp_baseline(run: rl.Run, config: ReinforcePpBaselineConfig) -> None:
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
            if config.loss.anchor == "trainer":
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "groups", "loss_mask")
            centred = rl.group_advantages(batch.rewards, batch.groups, scale="none")
            batch = batch.assign(advantages=rl.whiten(rl.rewards_to_go(centred, batch.loss_mask), batch.loss_mask))
            parts = rl.minibatches(batch, config.epochs, config.minibatches, (run.seed, step))
            metrics = rl.Metrics.mean([await policy.update(part, config.loss) for part in parts])
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
