"""GSPO: group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

Like GRPO, but with one ratio for the whole completion: the geometric mean of its tokens' ratios to the old policy. The
clip applies to it. So all tokens of a completion have the same weight, just as they have the same reward.

    meshrl run gspo/quickstart
"""

import meshrl as rl


class GspoConfig(rl.RolloutConfig):
    loss: rl.SequenceLoss = rl.SequenceLoss()
    epochs: int = 1  # passes over the rows of a step
    minibatches: int = 4  # updates in an epoch. Above 1, the clip acts even with `ahead = 0`
    sampling: rl.GroupSampling = rl.GroupSampling()


async def gspo(run: rl.Run, config: GspoConfig) -> None:
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
            batch = batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups))
            parts = rl.minibatches(batch, config.epochs, config.minibatches, (run.seed, step))
            metrics = rl.Metrics.mean([await policy.update(part, config.loss) for part in parts])
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
