"""Mistakes in evaluation beside a run's steps."""

import meshrl as rl

EVERY = rl.EvaluationConfig(every=50)
PROMPTS = rl.Batch.of(prompt=["cat>", "act>"], answer=["tac", "tca"])


async def _run(prompts: rl.Batch) -> None:
    async with rl.Run(rl.RunConfig()) as run:
        await run.spawn(rl.Policy, rl.PolicyConfig(backend="fake", model="none"))
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(backend="fake", model="none"))
        rl.evaluate_during(run, EVERY, sampler, prompts, rl.Sampling())
        async for _ in run.steps(100):
            pass


async def evaluation_without_prompts() -> None:
    await _run(PROMPTS.select([]))


async def evaluation_that_fails() -> None:
    await _run(PROMPTS.assign(answer=["tac", ""]))


async def script_that_never_evaluates() -> None:
    async with rl.Run(rl.RunConfig(), {"evaluation": EVERY}) as run:
        async for _ in run.steps(100):
            pass
