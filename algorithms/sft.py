"""Supervised fine-tuning: maximise the likelihood of the answers.

meshrl run sft/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    CrossEntropy,
    Policy,
    PolicyConfig,
    Run,
    Sampler,
    SamplerConfig,
    Sampling,
    Task,
    TaskConfig,
    evaluate,
    evaluate_during,
    publish,
)


class SftConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    sampling: Sampling = Sampling()
    loss: CrossEntropy = CrossEntropy()
    rows: int = 64
    """Rows a step."""
    steps: int = 200


async def sft(run: Run, config: SftConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, policy=policy)
    rows = task.batches(config.rows, run.seed)
    async for _ in run.steps(config.steps):
        batch = next(rows)
        batch = await policy.encode(batch.assign(completion=batch["answer"]))
        await run.record(await policy.update(batch, config.loss))

    await publish(policy, sampler)
    after = await evaluate(sampler, task.held_out, config.sampling)
    await policy.save(str(run.folder / "model"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
    )
