"""DAPO: decoupled clip and dynamic sampling (Yu et al. 2025, arXiv:2503.14476).

Like GRPO, with four changes. The upper bound of the clip is wider. Prompts whose completions are all right or all wrong
are replaced. Each token weighs the same. Completions near the token limit lose some reward.

    meshrl run dapo/quickstart
"""

import meshrl as rl


class DapoConfig(rl.RolloutConfig):
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2, clip_high=0.28)
    overlong_buffer: int = 0
    """Length of the penalty zone in tokens, at the end of `sampling.max_tokens`. A completion that ends in it
    gets up to 1 less reward. 0: no penalty."""
    epochs: int = 1  # passes over the rows of a step
    minibatches: int = 16  # updates in an epoch. Above 1, the clip acts even with `ahead = 0`
    sampling: rl.GroupSampling = rl.GroupSampling()


async def dapo(run: rl.Run, config: DapoConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reward = await run.spawn(rl.Reward, config.reward)
    reference = await run.spawn(rl.Reference, config.reference) if config.loss.kl else None

    await rl.publish(policy, sampler)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        rl.held_out(run, sampler, task.held_out, config, reward.score),
        rl.rollouts(
            sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score, keep=rl.has_signal
        ) as stream,
    ):
        async for step in run.steps(config.steps):
            batch = await anext(stream)
            if config.loss.anchor == "trainer":
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "groups", "loss_mask")
            lengths = [mask.sum() for mask in batch.loss_mask]
            rewards = batch.rewards + rl.overlong_penalty(lengths, config.sampling.max_tokens, config.overlong_buffer)
            batch = batch.assign(advantages=rl.group_advantages(rewards, batch.groups))
            parts = rl.minibatches(batch, config.epochs, config.minibatches, (run.seed, step))
            metrics = rl.Metrics.mean([await policy.update(part, config.loss) for part in parts])
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
