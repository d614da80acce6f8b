"""GRPO: group relative policy optimisation (DeepSeekMath, arXiv:2402.03300).

Sample a group of completions for each prompt. A completion's advantage is how much better its reward is than those of
its group. Raise the probability of better completions, within the clip. The paper uses
`loss.normalise = "sequence-mean"` and `loss.kl = 0.04`.

    meshrl run grpo/quickstart
"""

import meshrl as rl


class GrpoConfig(rl.RolloutConfig):
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2)
    epochs: int = 1  # passes over the rows of a step
    minibatches: int = 1  # updates in an epoch. Above 1, the clip acts even with `ahead = 0`
    sampling: rl.GroupSampling = rl.GroupSampling()


async def grpo(run: rl.Run, config: GrpoConfig) -> None:
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
