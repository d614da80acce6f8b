"""ReMax: REINFORCE with the reward of the greedy completion as baseline (Li et al. 2023, arXiv:2310.10505).

Sample a completion for each prompt, and decode the greedy one too. The advantage is the first one's reward minus the
greedy one's. Raise the log-probability of the whole completion by it. Each prompt has its own baseline, without a group
or a critic.

    meshrl run remax/quickstart
"""

import numpy as np

import meshrl as rl


class RemaxConfig(rl.RolloutConfig):
    loss: rl.ReinforceLoss = rl.ReinforceLoss()
    kl: float = 0.0  # weight of the KL to the reference, which is subtracted from the reward
    prompts: int = 256
    sampling: rl.Sampling = rl.Sampling()


async def remax(run: rl.Run, config: RemaxConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reward = await run.spawn(rl.Reward, config.reward)
    reference = await run.spawn(rl.Reference, config.reference) if config.kl or config.loss.kl else None

    async def score(batch: rl.Batch) -> rl.Batch:
        return await rl.greedy_baseline(sampler, await reward.score(batch), config.sampling, reward.score)

    await rl.publish(policy, sampler)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        rl.held_out(run, sampler, task.held_out, config, reward.score),
        rl.rollouts(sampler, prompts, config.sampling, ahead=config.ahead, score=score) as stream,
    ):
        async for _ in run.steps(config.steps):
            batch = await anext(stream)
            if config.kl:
                batch = await policy.logprobs(batch)
            if reference:
                batch = await reference.logprobs(batch)
            batch = await batch.load("rewards", "baseline", *rl.kl_columns(config.kl))
            advantages = rl.penalised_rewards(batch, config.kl) - np.asarray(batch.row("baseline"), np.float32)
            advantages[np.isnan(advantages)] = 0  # nothing is learned without the reward or the baseline
            metrics = await policy.update(batch.assign(advantages=advantages), config.loss)
            await rl.publish(policy, stream)
            await run.record(metrics, batch, **rl.kl_metrics(batch))
    await policy.save(str(run.folder / "model"))
