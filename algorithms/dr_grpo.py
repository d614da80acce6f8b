"""Dr. GRPO: GRPO done right, without its two biases (Liu et al. 2025, arXiv:2503.20783).

Like the paper's GRPO, with two changes. Advantages are not divided by the group's standard deviation, which would
favour prompts that are too easy or too hard. Each row's loss is divided by the same constant instead of its length,
which would favour long wrong completions.

    meshrl run dr_grpo/quickstart
"""

import meshrl as rl


class DrGrpoConfig(rl.RolloutConfig):
    loss: rl.ConstantLoss = rl.ConstantLoss(constant=16)
    epochs: int = 1  # passes over the rows of a step
    minibatches: int = 1  # updates in an epoch. Above 1, the clip acts even with `ahead = 0`
    sampling: rl.GroupSampling = rl.GroupSampling()


async def dr_grpo(run: rl.Run, config: DrGrpoConfig) -> None:
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
            batch = batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups, scale="none"))
            parts = rl.minibatches(batch, config.epochs, config.minibatches, (run.seed, step))
            metrics = rl.Metrics.mean([await policy.update(part, config.loss) for part in parts])
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
