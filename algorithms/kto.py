"""KTO: Kahneman-Tversky optimisation (arXiv:2402.01306), from completions that are labelled good or bad.

Raise the policy's probability of a good completion and lower that of a bad one, against a frozen reference, until they
are clearly above or below what the policy gives completions at large; no pairs, no reward and no sampling.

    meshrl run kto/quickstart
"""

import numpy as np

import meshrl as rl


class KtoConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    """`task.answer` is the template of the completion, "{completion}" for example."""
    label: str = "label"
    """The row's key that says whether it is good, true or false; "": every second answer is made a bad one."""
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    reference: rl.ReferenceConfig
    sampling: rl.Sampling = rl.Sampling()
    loss: rl.KtoLoss = rl.KtoLoss()
    rows: int = 64
    """Rows a step, good and bad."""
    steps: int = 200


async def kto(run: rl.Run, config: KtoConfig) -> None:
    task = rl.Task.load(config.task)
    held_out = rl.labelled(task.held_out, config.label)
    held_out = held_out.select(held_out.row("desirable"))  # whose answers are right
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reference = await run.spawn(rl.Reference, config.reference)

    await rl.publish(policy, sampler)
    rows = task.batches(config.rows, run.seed)
    async with rl.held_out(run, sampler, held_out, config, policy=policy):
        async for _ in run.steps(config.steps):
            batch = rl.labelled(next(rows), config.label)
            others = await policy.logprobs(await policy.encode(rl.mismatched(batch)))
            kl = await rl.reference_point(await reference.logprobs(others))
            batch = await reference.logprobs(await policy.encode(batch))
            batch = batch.assign(kl=np.full(len(batch), kl, np.float32))
            await run.record(await policy.update(batch, config.loss), mismatched_kl=kl)
        await rl.publish(policy, sampler)
    await policy.save(str(run.folder / "model"))
