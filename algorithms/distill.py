"""On-policy distillation: the student samples, the teacher scores each token (MiniLLM, arXiv:2306.08543; GKD).

Sample a completion for each prompt. The loss of each token is the student's log-probability minus the teacher's: the
reverse KL divergence on the student's completions. No reward is needed.

    meshrl run distill/quickstart
"""

import meshrl as rl


class DistillConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    policy: rl.PolicyConfig
    sampler: rl.SamplerConfig
    teacher: rl.TeacherConfig
    """The model that the policy learns from. It must use the policy's tokenizer."""
    sampling: rl.Sampling = rl.Sampling()
    loss: rl.ReverseKl = rl.ReverseKl()
    ahead: int = 0
    """Published weight versions that rollouts may be behind. Above 0, rollouts run while the policy trains."""
    prompts: int = 256
    """Prompts in a step. Each has `sampling.n` completions."""
    steps: int = 400  # training steps


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
