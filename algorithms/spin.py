"""SPIN: self-play fine-tuning (arXiv:2401.01335), from answers alone.

The policy plays against itself: the answer is better than the completion that it drew as it was when the iteration
began, and that policy is the reference too. When it draws what the answers are, there is nothing left to learn.

    meshrl run spin/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    Policy,
    PolicyConfig,
    PreferenceLoss,
    Reference,
    ReferenceConfig,
    Run,
    Sampler,
    SamplerConfig,
    Sampling,
    Task,
    TaskConfig,
    answer_pairs,
    evaluate,
    evaluate_during,
    pair_metrics,
    publish,
    rollout,
    with_margins,
)


class SpinConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    reference: ReferenceConfig
    sampling: Sampling = Sampling()
    loss: PreferenceLoss = PreferenceLoss()
    rows: int = 64
    """Answers a step, each paired with one completion: `sampling.n` is taken as 1."""
    iteration: int = 50
    """Steps with one opponent, which is then the policy as it has become."""
    steps: int = 200


async def spin(run: Run, config: SpinConfig) -> None:
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    reference = await run.spawn(Reference, config.reference)
    sampling = config.sampling.model_copy(update={"n": 1})

    await reference.load(await publish(policy, sampler))
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, sampling)
    rows = task.batches(config.rows, run.seed)
    async for step in run.steps(config.steps):
        if step and step % config.iteration == 0:
            await reference.load(await publish(policy, sampler))
        batch = next(rows)
        drawn = await (await rollout(sampler, batch, sampling)).load("completion")
        pairs = await policy.encode(answer_pairs(batch, drawn.objects("completion")))
        pairs = await with_margins(policy, reference, pairs)
        await run.record(await policy.update(pairs, config.loss), None, **pair_metrics(pairs))

    await publish(policy, sampler)
    after = await evaluate(sampler, task.held_out, sampling)
    await policy.save(str(run.folder / "model"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
    )
