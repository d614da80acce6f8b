"""RLOO: REINFORCE with the mean of the others as baseline (Ahmadian et al. 2024, arXiv:2402.14740).

Sample a group of completions for each prompt. A completion's advantage is its reward minus the mean of the *others* in
its group. Raise the log-probability of the whole completion by it. There is no clip and no division by the deviation.

    meshrl run rloo/quickstart
"""

import meshrl as rl


class RlooConfig(rl.RolloutConfig):
    loss: rl.ReinforceLoss = rl.ReinforceLoss()
    kl: float = 0.0  # weight of the KL to the reference, which is subtracted from the reward
    sampling: rl.GroupSampling = rl.GroupSampling()


async def rloo(run: rl.Run, config: RlooConfig) -> None:
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
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            if config.kl:
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "groups", *rl.kl_columns(config.kl))
            batch = batch.assign(advantages=rl.leave_one_out(rl.penalised_rewards(batch, config.kl), batch.groups))
            metrics = await policy.update(batch, config.loss)
            await rl.publish(policy, stream)
            await run.record(metrics, batch, **rl.kl_metrics(batch))
    await policy.save(str(run.folder / "model"))
