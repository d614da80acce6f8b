"""KTO: Kahneman-Tversky optimisation (arXiv:2402.01306), from completions that are labelled good or bad.

Raise the policy's probability of good completions and lower that of bad ones, relative to a frozen reference, until
they are clearly above or below that of completions in general. There are no pairs, no reward and no sampling.

    meshrl run kto/quickstart
"""

import numpy as np

import meshrl as rl


class KtoConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    """The rows. `task.answer` is the template of the completion, such as "{completion}"."""
    label: str = "label"
    """Key of a row's label: true for a good completion, false for a bad one. "": every second answer is made bad."""
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    reference: rl.ReferenceConfig
    sampling: rl.Sampling = rl.Sampling()
    loss: rl.KtoLoss = rl.KtoLoss()
    rows: int = 64
    """Rows in a step, good and bad ones."""
    steps: int = 200  # training steps

    def examples(self, rows: rl.Batch) -> rl.Batch:
        """Return each row's completion and label."""
        return rl.labelled(rows, self.label)


async def kto(run: rl.Run, config: KtoConfig) -> None:
    task = rl.Task.load(config.task)
    held_out = config.examples(task.held_out)
    held_out = held_out.select(held_out.row("desirable"))  # the right answers only
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reference = await run.spawn(rl.Reference, config.reference)

    await rl.publish(policy, sampler)
    rows = task.batches(config.rows, run.seed)
    async with rl.held_out(run, sampler, held_out, config, policy=policy):
        async for _ in run.steps(config.steps):
            batch = await policy.encode(config.examples(next(rows)))
            others = rl.mismatched(await batch.load("tokens", "loss_mask"))
            kl = await rl.reference_point(await reference.logprobs(await policy.logprobs(others)))
            batch = await reference.logprobs(batch)
            batch = batch.assign(kl=np.full(len(batch), kl, np.float32))
            await run.record(await policy.update(batch, config.loss), mismatched_kl=kl)
        await rl.publish(policy, sampler)
    await policy.save(str(run.folder / "model"))
