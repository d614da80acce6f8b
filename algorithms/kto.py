"""KTO: Kahneman-Tversky optimisation (arXiv:2402.01306), from completions that are labelled good or bad.

Raise the policy's probability of a good completion and lower that of a bad one, against a frozen reference, until they
are clearly above or below what the policy gives completions at large; no pairs, no reward and no sampling.

    meshrl run kto/quickstart
"""

import numpy as np

from meshrl import (
    AlgorithmConfig,
    KtoLoss,
    Policy,
    PolicyConfig,
    Reference,
    ReferenceConfig,
    Run,
    Sampler,
    SamplerConfig,
    Sampling,
    Task,
    TaskConfig,
    evaluate,
    evaluate_during,
    labelled,
    mismatched_kl,
    publish,
)


class KtoConfig(AlgorithmConfig):
    task: TaskConfig
    """`task.answer` is the template of the completion, "{completion}" for example."""
    label: str = "label"
    """The row's key that says whether it is good, true or false; "": every second answer is made a bad one."""
    policy: PolicyConfig
    sampler: SamplerConfig
    reference: ReferenceConfig
    sampling: Sampling = Sampling()
    loss: KtoLoss = KtoLoss()
    rows: int = 64
    """Rows a step, good and bad."""
    steps: int = 200


async def kto(run: Run, config: KtoConfig) -> None:
    task = Task.load(config.task)
    held_out = labelled(task.held_out, config.label)
    held_out = held_out.select(held_out.row("desirable"))  # whose answers are right
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    reference = await run.spawn(Reference, config.reference)

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, held_out, config.sampling, policy=policy)
    rows = task.batches(config.rows, run.seed)
    async for _ in run.steps(config.steps):
        batch = await policy.encode(labelled(next(rows), config.label))
        kl = await mismatched_kl(policy, reference, batch)
        batch = (await reference.logprobs(batch)).assign(kl=np.full(len(batch), kl, np.float32))
        await run.record(await policy.update(batch, config.loss), mismatched_kl=kl)

    await publish(policy, sampler)
    after = await evaluate(sampler, held_out, config.sampling)
    await policy.save(str(run.folder / "model"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
    )
