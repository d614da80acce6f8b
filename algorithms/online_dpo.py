"""Online DPO: direct preference optimisation on the policy's own completions (arXiv:2402.04792).

Sample several completions for each prompt and score them. The best and the worst are a pair. Raise the policy's
probability of the best over the worst, relative to a frozen reference, as DPO does (arXiv:2305.18290).

    meshrl run online_dpo/quickstart
"""

import meshrl as rl


class OnlineDpoConfig(rl.RolloutConfig):
    loss: rl.PreferenceLoss = rl.PreferenceLoss()
    prompts: int = 64
    """Prompts in a step. Each has `sampling.n` completions, and two of them are trained on."""
    sampling: rl.PairSampling = rl.PairSampling(n=4)


async def online_dpo(run: rl.Run, config: OnlineDpoConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reward = await run.spawn(rl.Reward, config.reward)
    reference = await run.spawn(rl.Reference, config.reference)

    await rl.publish(policy, sampler)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        rl.held_out(run, sampler, task.held_out, config, reward.score),
        rl.rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=reward.score) as stream,
    ):
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            pairs = rl.best_and_worst(await batch.load("rewards", "groups"))
            metrics, numbers = rl.Metrics.of(), dict[str, float]()
            if len(pairs):  # none if no prompt has two known rewards
                pairs = await reference.logprobs(await policy.logprobs(pairs))
                pairs = await rl.preference_columns(pairs)
                metrics, numbers = await policy.update(pairs, config.loss), rl.pair_metrics(pairs)
            await rl.publish(policy, stream)
            await run.record(metrics, batch, **numbers)
    await policy.save(str(run.folder / "model"))
