"""SPIN: self-play fine-tuning (arXiv:2401.01335), from answers alone.

The policy plays against an earlier self. Each answer is paired, as the better one, with a completion of the policy at
the start of the iteration, which is the reference too. Learning ends when the policy's completions equal the answers.

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
    """Answers in a step. Each is paired with one completion: `sampling.n` counts as 1."""
    iteration: int = 50
    """Steps in an iteration. After it, the current policy becomes the opponent."""
    steps: int = 200  # training steps

    def examples(self, rows: rl.Batch) -> rl.Batch:
        """Return the better half of each pair: each row's answer."""
        return rows.assign(completion=rl.learned_answers(rows))


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
