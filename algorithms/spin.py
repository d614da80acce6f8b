"""SPIN: self-play fine-tuning (arXiv:2401.01335), from answers alone.

The policy plays against itself: the answer is better than the completion that it drew as it was when the iteration
began, and that policy is the reference too. When it draws what the answers are, there is nothing left to learn.

    meshrl run spin/quickstart
"""

import meshrl as rl


class SpinConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    reference: rl.ReferenceConfig
    sampling: rl.Sampling = rl.Sampling()
    loss: rl.PreferenceLoss = rl.PreferenceLoss()
    rows: int = 64
    """Answers a step, each paired with one completion: `sampling.n` is taken as 1."""
    iteration: int = 50
    """Steps with one opponent, which is then the policy as it has become."""
    steps: int = 200


async def spin(run: rl.Run, config: SpinConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reference = await run.spawn(rl.Reference, config.reference)
    sampling = config.sampling.model_copy(update={"n": 1})

    await reference.load(await rl.publish(policy, sampler))
    rows = task.batches(config.rows, run.seed)
    async with rl.held_out(run, sampler, task.held_out, config):
        async for step in run.steps(config.steps):
            if step and step % config.iteration == 0:
                await reference.load(await rl.publish(policy, sampler))
            batch = next(rows)
            drawn = await (await rl.rollout(sampler, batch, sampling)).load("completion")
            pairs = await policy.encode(rl.answer_pairs(batch, drawn.objects("completion")))
            pairs = await reference.logprobs(await policy.logprobs(pairs))
            pairs = await rl.preference_columns(pairs)
            await run.record(await policy.update(pairs, config.loss), None, **rl.pair_metrics(pairs))
        await rl.publish(policy, sampler)
    await policy.save(str(run.folder / "model"))
