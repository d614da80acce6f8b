"""On-policy distillation: the student draws, the teacher judges each token (MiniLLM, arXiv:2306.08543; GKD).

Draw a completion for each prompt; the loss of each token is how much more probable the student finds it than the
teacher does: the reverse KL divergence on what the student itself writes. No reward is needed.

    meshrl run distill/quickstart
"""

import meshrl as rl


class DistillConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    teacher: rl.TeacherConfig
    """A model of its own, with the policy's tokens."""
    sampling: rl.Sampling = rl.Sampling()
    loss: rl.ReverseKl = rl.ReverseKl()
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 256
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def distill(run: rl.Run, config: DistillConfig) -> None:
    rl.check_teacher(config.policy, config.teacher)
    task = rl.Task.load(config.task)
    policy = await run.spawn(rl.Policy, config.policy)
    sampler = await run.spawn(rl.Sampler, config.sampler)
    teacher = await run.spawn(rl.Reference, config.teacher)

    await rl.publish(policy, sampler)
    prompts = task.batches(config.prompts, run.seed)
    async with (
        rl.held_out(run, sampler, task.held_out, config),
        rl.rollouts(sampler, prompts, config.sampling, ahead=config.ahead) as stream,
    ):
        async for _ in run.steps(config.steps):
            batch = await teacher.logprobs(await anext(stream))
            metrics = await policy.update(batch, config.loss)
            await rl.publish(policy, stream)
            await run.record(metrics, batch)
    await policy.save(str(run.folder / "model"))
