"""PPO: proximal policy optimisation (arXiv:1707.06347), with a critic and generalised advantage estimation.

Draw completions; a critic says of each token how much better the reward is than was to be expected there; raise the
probability of the better tokens, within the clip, and teach the critic, in several mini-batches.

    meshrl run ppo/quickstart
"""

import asyncio

from meshrl import (
    AlgorithmConfig,
    ClippedLoss,
    Critic,
    CriticConfig,
    Gae,
    Metrics,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    Reward,
    RewardConfig,
    RewardModelConfig,
    Run,
    Sampler,
    SamplerConfig,
    Sampling,
    Task,
    TaskConfig,
    ValueLoss,
    evaluate,
    evaluate_during,
    explained_variance,
    minibatches,
    publish,
    rollouts,
    whiten,
)


class PpoConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    critic: CriticConfig
    sampler: SamplerConfig
    reward: RewardConfig | RewardModelConfig
    reference: ReferenceConfig
    """Used where `loss.kl` or `gae.kl` is above 0."""
    sampling: Sampling = Sampling()
    gae: Gae = Gae()
    whiten: bool = True
    loss: ClippedLoss = ClippedLoss(clip=0.2, anchor="trainer")
    value_loss: ValueLoss = ValueLoss(clip=0.2)
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    epochs: int = 1
    minibatches: int = 2
    prompts: int = 512
    steps: int = 400


async def ppo(run: Run, config: PpoConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    critic = await run.spawn(Critic, config.critic)
    sampler = await run.spawn(Sampler, config.sampler)
    reward = await run.spawn(Reward, config.reward)
    reference = await run.spawn(Reference, config.reference) if config.loss.kl or config.gae.kl else None

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, reward.score)
    prompts = task.batches(config.prompts, run.seed)
    async with rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream:
        async for step in run.steps(config.steps):
            batch = await policy.logprobs(await anext(stream))  # before any update: the policy that the clip is around
            if reference:
                batch = await reference.logprobs(batch)
            batch = await (await critic.advantages(batch, config.gae)).load("advantages", "loss_mask")  # which are read
            if config.whiten:
                batch = batch.assign(advantages=whiten(batch.ragged("advantages"), batch.loss_mask))
            updates: list[tuple[Metrics, Metrics]] = []
            for part in minibatches(batch, config.epochs, config.minibatches, (run.seed, step)):
                both = policy.update(part, config.loss), critic.update(part, config.value_loss)
                updates.append(await asyncio.gather(*both))
            await publish(policy, stream)
            metrics, values = (Metrics.mean(each) for each in zip(*updates, strict=True))
            told = {f"critic_{name}": value for name, value in values.means().items()}
            await run.record(metrics, batch, critic_explained_variance=explained_variance(values), **told)

    after = await evaluate(sampler, task.held_out, config.sampling)
    await policy.save(str(run.folder / "model"))
    await critic.save(str(run.folder / "critic"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
    )
