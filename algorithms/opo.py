"""OPO: on-policy REINFORCE with the minimum-variance baseline (Hao et al. 2025, arXiv:2505.23585).

Sample a group of completions for each prompt. The baseline is the group's mean reward, weighted by the length of each
completion. Raise the log-probability of completions that are above it. Keep `ahead = 0`: the algorithm is exactly
on-policy.

    meshrl run opo/quickstart
"""

import meshrl as rl


class OpoConfig(rl.RolloutConfig):
    loss: rl.ReinforceLoss = rl.ReinforceLoss()
    sampling: rl.GroupSampling = rl.GroupSampling()


async def opo(run: rl.Run, config: OpoConfig) -> None:
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
            batch = await batch.load("rewards", "groups", "loss_mask")
            lengths = [mask.sum() for mask in batch.loss_mask]
            advantages = rl.optimal_advantages(batch.rewards, batch.groups, lengths)
            metrics = await policy.update(batch.assign(advantages=advantages), config.loss)
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
