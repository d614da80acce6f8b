"""DPO: direct preference optimisation (arXiv:2305.18290), from pairs of a better and a worse completion.

Raise the policy's probability of the better completion over the worse one, relative to a frozen reference. There is no
reward and no sampling. A row's answer is the better completion. IPO (arXiv:2310.12036) and label smoothing are options
of the loss.

    meshrl run dpo/quickstart
"""

import meshrl as rl


class DpoConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    """The rows. `task.answer` is the template of the better completion, such as "{chosen}"."""
    rejected: str = "{rejected}"
    """Template of the worse completion, as for `str.format`. "": the answer with two neighbouring characters
    exchanged."""
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    reference: rl.ReferenceConfig
    sampling: rl.Sampling = rl.Sampling()
    loss: rl.PreferenceLoss = rl.PreferenceLoss()
    rows: int = 64
    """Pairs in a step."""
    steps: int = 200  # training steps

    def examples(self, rows: rl.Batch) -> rl.Batch:
        """Return a pair of each row."""
        return rl.answer_pairs(rows, rl.rejected_answers(rows, self.rejected))


async def dpo(run: rl.Run, config: DpoConfig) -> None:
    task = rl.Task.load(config.task)
    held_out = config.examples(task.held_out)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    reference = await run.spawn(rl.Reference, config.reference)

    await rl.publish(policy, sampler)
    rows = task.batches(config.rows, run.seed)
    async with rl.held_out(run, sampler, task.held_out, config, policy=policy):
        async for _ in run.steps(config.steps):
            pairs = await policy.encode(config.examples(next(rows)))
            pairs = await reference.logprobs(await policy.logprobs(pairs))
            pairs = await rl.preference_columns(pairs)
            await run.record(await policy.update(pairs, config.loss), None, **rl.pair_metrics(pairs))
        await rl.publish(policy, sampler)
    judged = await reference.logprobs(await policy.logprobs(await policy.encode(held_out)))
    held_out_metrics = rl.pair_metrics(await rl.preference_columns(judged))
    await policy.save(str(run.folder / "model"))
    run.summary(**{f"held_out_{name}": value for name, value in held_out_metrics.items()})
