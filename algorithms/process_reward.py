"""A process reward model from texts whose steps are labelled right or wrong (arXiv:2305.20050, arXiv:2312.08935).

Score each step at its last token: above 0 where it is likelier right than wrong. No pairs. What is saved is the `model`
of another run's `[reward]`, which gives a text the score of its last step.

    meshrl run process_reward/quickstart
"""

import meshrl as rl


class ProcessRewardConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    completion: str = "completions"
    """The row's key of the steps, a list of texts; "": an answer's characters, in every second row a wrong one's."""
    labels: str = "labels"
    """The row's key of their labels: true, false, or the chance that a step is right."""
    reward: rl.RewardTrainingConfig
    """Its model is a policy's, which is given a head, or one that judges already."""
    loss: rl.ProcessLoss = rl.ProcessLoss()
    rows: int = 64
    """Texts a step of training."""
    steps: int = 200


async def process_reward(run: rl.Run, config: ProcessRewardConfig) -> None:
    task = rl.Task.load(config.task)
    model = await run.spawn(rl.RewardModel, config.reward)

    async def labelled(batch: rl.Batch) -> rl.Batch:
        return await rl.with_labels(await model.encode(rl.labelled_steps(batch, config.completion, config.labels)))

    async def held_out() -> dict[str, float]:
        return await rl.step_score_metrics(await model.token_scores(await labelled(task.held_out)))

    before = await run.once("before", held_out)
    rows = task.batches(config.rows, run.seed)
    async for _ in run.steps(config.steps):
        await run.record(await model.update(await labelled(next(rows)), config.loss))

    after = await held_out()
    await model.save(str(run.folder / "model"))
    run.summary(
        **{f"held_out_{name}_before": value for name, value in before.items()},
        **{f"held_out_{name}_after": value for name, value in after.items()},
    )
