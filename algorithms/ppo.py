"""PPO: proximal policy optimisation (arXiv:1707.06347), with a critic and generalised advantage estimation.

Draw completions; a critic says of each token how much better the reward is than was to be expected there; raise the
probability of the better tokens, within the clip, and teach the critic, in several mini-batches.

    meshrl run ppo/quickstart
"""

import asyncio

import meshrl as rl


class PpoConfig(rl.RolloutConfig):
    critic: rl.CriticConfig
    gae: rl.Gae = rl.Gae()
    whiten: bool = True
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2, anchor="trainer")
    value_loss: rl.ValueLoss = rl.ValueLoss(clip=0.2)
    epochs: int = 1
    minibatches: int = 2
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
            batch = await policy.logprobs(await anext(stream))  # before any update: the policy that the clip is around
            if reference:
                batch = await reference.logprobs(batch)
            batch = await (await critic.advantages(batch, config.gae)).load("advantages", "loss_mask")  # which are read
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
