"""PPO: proximal policy optimisation (arXiv:1707.06347), with a critic and generalised advantage estimation.

Sample completions. A critic estimates for each token how much better the reward is than expected. Raise the probability
of better tokens, within the clip, and train the critic, in several mini-batches.

    meshrl run ppo/quickstart
"""

import asyncio

import meshrl as rl


class PpoConfig(rl.RolloutConfig):
    critic: rl.CriticConfig
    gae: rl.Gae = rl.Gae()
    whiten: bool = True  # scale advantages to mean 0 and deviation 1 over the batch
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2, anchor="trainer")
    value_loss: rl.ValueLoss = rl.ValueLoss(clip=0.2)
    epochs: int = 1  # passes over the rows of a step
    minibatches: int = 2  # updates in an epoch
    prompts: int = 512
    sampling: rl.Sampling = rl.Sampling()


async def ppo(run: rl.Run, config: PpoConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    critic = await run.spawn(rl.Critic, config.critic)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reward = await run.spawn(rl.Reward, config.reward)
    reference = await run.spawn(rl.Reference, config.reference) if config.loss.kl or config.gae.kl else None

    await rl.publish(policy, sampler)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        rl.held_out(run, sampler, task.held_out, config, reward.score),
        rl.rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream,
    ):
        async for step in run.steps(config.steps):
            batch = await policy.logprobs(await anext(stream))  # the old policy of the clip, before any update
            if reference:
                batch = await reference.logprobs(batch)
            batch = await (await critic.advantages(batch, config.gae)).load("advantages", "loss_mask")  # read below
            if config.whiten:
                batch = batch.assign(advantages=rl.whiten(batch.ragged("advantages"), batch.loss_mask))
            updates: list[tuple[rl.Metrics, rl.Metrics]] = []
            for part in rl.minibatches(batch, config.epochs, config.minibatches, (run.seed, step)):
                both = policy.update(part, config.loss), critic.update(part, config.value_loss)
                updates.append(await asyncio.gather(*both))
            await rl.publish(policy, stream)
            metrics, values = (rl.Metrics.mean(each) for each in zip(*updates, strict=True))
            told = {f"critic_{name}": value for name, value in values.means().items()}
            await run.record(metrics, batch, critic_explained_variance=rl.explained_variance(values), **told)
    await policy.save(str(run.folder / "model"))
    await critic.save(str(run.folder / "critic"))
