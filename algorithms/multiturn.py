"""GRPO over episodes: the model and an environment speak by turns, and the model learns from what it wrote.

GRPO (arXiv:2402.03300) with whole episodes for completions: a row's reward is the sum of its turns', its advantage is
how much better that is than its group's, and what the environment wrote is not learnt.

    meshrl run multiturn/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    ClippedLoss,
    Environment,
    EnvironmentConfig,
    Episodes,
    GroupSampling,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    Run,
    Sampler,
    SamplerConfig,
    Task,
    TaskConfig,
    evaluate_during,
    group_advantages,
    publish,
    rollout,
    rollouts,
)


class MultiturnConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    environment: EnvironmentConfig
    reference: ReferenceConfig
    """Used where `loss.kl` is above 0."""
    sampling: GroupSampling = GroupSampling()
    """`max_tokens` and `stop` are of a turn."""
    loss: ClippedLoss = ClippedLoss(clip=0.2)
    ahead: int = 0
    """How many publications of weights the episodes may be behind; above 0 they go on while the policy trains."""
    prompts: int = 64
    """Prompts a step; each has `sampling.n` episodes."""
    steps: int = 400


async def multiturn(run: Run, config: MultiturnConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    environment = await run.spawn(Environment, config.environment)
    sampler = Episodes(await run.spawn(Sampler, config.sampler), environment, config.environment)
    reference = await run.spawn(Reference, config.reference) if config.loss.kl else None

    async def play() -> dict[str, float]:
        played = await rollout(sampler, task.held_out, config.sampling.model_copy(update={"n": 1}))
        return {"reward": float(played.rewards.mean()), "turns": float(played.row("turns").mean())}

    await publish(policy, sampler)
    before = await run.once("before", play)
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling)
    prompts = task.batches(config.prompts, run.seed)
    async with rollouts(sampler, prompts, config.sampling, ahead=config.ahead) as stream:
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            if config.loss.anchor == "trainer":
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            advantages = group_advantages(batch.rewards, batch.groups)
            metrics = await policy.update(batch.assign(advantages=advantages), config.loss)
            await publish(policy, stream)
            await run.record(metrics, batch)

    after = await play()
    await policy.save(str(run.folder / "model"))
    run.summary(
        reward_before=before["reward"],
        reward_after=after["reward"],
        turns_before=before["turns"],
        turns_after=after["turns"],
    )
