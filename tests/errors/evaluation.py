"""Mistakes in evaluation beside a run's steps."""

from meshrl import (
    Batch,
    EvaluationConfig,
    Policy,
    PolicyConfig,
    Run,
    RunConfig,
    Sampler,
    SamplerConfig,
    Sampling,
    evaluate_during,
)

EVERY = EvaluationConfig(every=50)
PROMPTS = Batch.of(prompt=["cat>", "act>"], answer=["tac", "tca"])


async def _run(prompts: Batch) -> None:
    async with Run(RunConfig()) as run:
        await run.spawn(Policy, PolicyConfig(backend="fake", model="none"))
        sampler = await run.spawn(Sampler, SamplerConfig(backend="fake", model="none"))
        evaluate_during(run, EVERY, sampler, prompts, Sampling())
        async for _ in run.steps(100):
            pass


async def evaluation_without_prompts() -> None:
    await _run(PROMPTS.select([]))


async def evaluation_that_fails() -> None:
    await _run(PROMPTS.assign(answer=["tac", ""]))


async def script_that_never_evaluates() -> None:
    async with Run(RunConfig(), {"evaluation": EVERY}) as run:
        async for _ in run.steps(100):
            pass
