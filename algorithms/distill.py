"""On-policy distillation: the student draws, the teacher judges each token (MiniLLM, arXiv:2306.08543; GKD).

Draw a completion for each prompt; the loss of each token is how much more probable the student finds it than the
teacher does: the reverse KL divergence on what the student itself writes. No reward is needed.

    meshrl run distill/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    Policy,
    PolicyConfig,
    Reference,
    ReverseKl,
    Run,
    Sampler,
    SamplerConfig,
    Sampling,
    Task,
    TaskConfig,
    TeacherConfig,
    check_teacher,
    evaluate,
    evaluate_during,
    publish,
    rollouts,
)


class DistillConfig(AlgorithmConfig):
    task: TaskConfig
    policy: PolicyConfig
    sampler: SamplerConfig
    teacher: TeacherConfig
    """A model of its own, with the policy's tokens."""
    sampling: Sampling = Sampling()
    loss: ReverseKl = ReverseKl()
    ahead: int = 0
    """How many publications of weights the rollouts may be behind; above 0 they go on while the policy trains."""
    prompts: int = 256
    """Prompts a step; each has `sampling.n` completions."""
    steps: int = 400


async def distill(run: Run, config: DistillConfig) -> None:
    check_teacher(config.policy, config.teacher)
    task = Task.load(config.task)
    policy = await run.spawn(Policy, config.policy)
    sampler = await run.spawn(Sampler, config.sampler)
    teacher = await run.spawn(Reference, config.teacher)

    await publish(policy, sampler)
    before = await run.once("before", lambda: evaluate(sampler, task.held_out, config.sampling))
    evaluate_during(run, config.evaluation, sampler, task.held_out, config.sampling)
    prompts = task.batches(config.prompts, run.seed)
    async with rollouts(sampler, prompts, config.sampling, ahead=config.ahead) as stream:
        async for _ in run.steps(config.steps):
            batch = await teacher.logprobs(await anext(stream))
            metrics = await policy.update(batch, config.loss)
            await publish(policy, stream)
            await run.record(metrics, batch)

    after = await evaluate(sampler, task.held_out, config.sampling)
    await policy.save(str(run.folder / "model"))
    run.summary(
        exact_match_before=before["greedy"],
        exact_match_after=after["greedy"],
        exact_match_sampled_before=before["sampled"],
        exact_match_sampled_after=after["sampled"],
    )
