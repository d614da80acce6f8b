"""DPO: direct preference optimisation (arXiv:2305.18290), from pairs of completions of which one is better.

Raise the policy's probability of the better completion over the worse one, against a frozen reference; no reward and no
sampling. The answer of a row is the better one. IPO (arXiv:2310.12036) and label smoothing are options of the loss.

    meshrl run dpo/quickstart
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
    rejected_answers,
    with_margins,
)


class DpoConfig(AlgorithmConfig):
    task: TaskConfig
    """`task.answer` is the template of the better completion, "{chosen}" for example."""
    rejected: str = "{rejected}"
    """`str.format` template of the worse one; "": the answer with two neighbouring characters exchanged."""
    policy: PolicyConfig
    sampler: SamplerConfig
    reference: ReferenceConfig
    sampling: Sampling = Sampling()
    loss: PreferenceLoss = PreferenceLoss()
    rows: int = 64
    """Pairs a step."""
    steps: int = 200


async def dpo(run: Run, config: DpoConfig) -> None:
    task = Task.load(config.task)
    held_out = answer_pairs(task.held_out, rejected_answers(task.held_out, config.rejected))
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    reference = await run.spawn(Reference, config.reference)

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling, policy=policy)
    rows = task.batches(config.rows, run.seed)
    async for _ in run.steps(config.steps):
        batch = next(rows)
        pairs = await policy.encode(answer_pairs(batch, rejected_answers(batch, config.rejected)))
        pairs = await with_margins(policy, reference, pairs)
        await run.record(await policy.update(pairs, config.loss), None, **pair_metrics(pairs))

    await publish(policy, sampler)
    after = await evaluate(sampler, task.held_out, config.sampling)
    judged = pair_metrics(await with_margins(policy, reference, await policy.encode(held_out)))
    await policy.save(str(run.folder / "model"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
        **{f"held_out_{name}": value for name, value in judged.items()},
    )
