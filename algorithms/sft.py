"""Supervised fine-tuning: maximise the likelihood of the answers.

meshrl run sft/quickstart
"""

import meshrl as rl


class SftConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    sampling: rl.Sampling = rl.Sampling()
    loss: rl.CrossEntropy = rl.CrossEntropy()
    rows: int = 64
    """Rows in a step."""
    steps: int = 200  # training steps

    def examples(self, rows: rl.Batch) -> rl.Batch:
        """Return each row's answer."""
        return rows.assign(completion=rl.learned_answers(rows))


async def sft(run: rl.Run, config: SftConfig) -> None:
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)

    await rl.publish(policy, sampler)
    rows = task.batches(config.rows, run.seed)
    async with rl.held_out(run, sampler, task.held_out, config, policy=policy):
        async for _ in run.steps(config.steps):
            batch = await policy.encode(config.examples(next(rows)))
            await run.record(await policy.update(batch, config.loss))
        await rl.publish(policy, sampler)
    await policy.save(str(run.folder / "model"))
