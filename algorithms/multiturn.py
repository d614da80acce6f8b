"""GRPO over episodes: the model and an environment take turns, and the model learns from its own turns.

GRPO (arXiv:2402.03300) with episodes instead of completions. A row's reward is the sum over its turns, and its
advantage compares the reward with those of its group. The environment's tokens are not learned.

    meshrl run multiturn/quickstart
"""

import meshrl as rl


class MultiturnConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    environment: rl.EnvironmentConfig
    reference: rl.ReferenceConfig
    """The model that the KL penalty compares with. Used if `loss.kl` is above 0."""
    sampling: rl.GroupSampling = rl.GroupSampling()
    """How the model samples. `max_tokens` and `stop` apply to each turn. `n` is the number of episodes for a prompt."""
    loss: rl.ClippedLoss = rl.ClippedLoss(clip=0.2)
    ahead: int = 0
    """Published weight versions that episodes may be behind. Above 0, episodes run while the policy trains."""
    prompts: int = 64
    """Prompts in a step. Each has `sampling.n` episodes."""
    steps: int = 400  # training steps


async def multiturn(run: rl.Run, config: MultiturnConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    environment = await run.spawn(rl.Environment, config.environment)
    sampler = rl.Episodes(await run.spawn(rl.Sampler, config.sampler), environment, config.environment)
    reference = await run.spawn(rl.Reference, config.reference) if config.loss.kl else None

    async def play() -> dict[str, float]:
        played = await rl.rollout(sampler, task.held_out, config.sampling.model_copy(update={"n": 1}))
        return {"reward": rl.known_mean(played.rewards), "turns": rl.known_mean(played.row("turns"))}

    await rl.publish(policy, sampler)
    before = await run.once("before", play)
    rl.evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling)
    prompts = task.batches(config.prompts, run.seed)
    async with rl.rollouts(sampler, prompts, config.sampling, ahead=config.ahead) as stream:
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            if config.loss.anchor == "trainer":
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            advantages = rl.group_advantages(batch.rewards, batch.groups)
            metrics = await policy.update(batch.assign(advantages=advantages), config.loss)
            await rl.publish(policy, stream)
            await run.record(metrics, batch)

    after = await play()
    await policy.save(str(run.folder / "model"))
    run.summary(
        reward_before=before["reward"],
        reward_after=after["reward"],
        turns_before=before["turns"],
        turns_after=after["turns"],
    )
