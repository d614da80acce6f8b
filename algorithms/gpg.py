"""GPG: group policy gradient (Chu et al. 2025, arXiv:2504.02546).

Sample a group of completions for each prompt. A completion's advantage is its reward minus the group's mean, scaled up
to make good for groups of equal rewards, which teach nothing. Raise each token's log-probability by it. There is no
clip and no reference.

    meshrl run gpg/quickstart
"""

import meshrl as rl


class GpgConfig(rl.RolloutConfig):
    loss: rl.ReinforceLoss = rl.ReinforceLoss(normalise="token-mean")
    sampling: rl.GroupSampling = rl.GroupSampling()


async def gpg(run: rl.Run, config: GpgConfig) -> None:
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
            batch = await batch.load("rewards", "groups")
            advantages = rl.rescaled_advantages(batch.rewards, batch.groups)
            metrics = await policy.update(batch.assign(advantages=advantages), config.loss)
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
