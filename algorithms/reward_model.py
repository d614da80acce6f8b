"""A reward model from pairs of completions of which one is better (arXiv:2203.02155).

Raise the score of the better completion above that of the worse one, by the Bradley-Terry model of preferences. The
answer of a row is the better one. What is saved is the `model` of another run's `[reward]`.

    meshrl run reward_model/quickstart
"""

import meshrl as rl


class RewardModelRunConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    """`task.answer` is the template of the better completion, "{chosen}" for example."""
    rejected: str = "{rejected}"
    """`str.format` template of the worse one; "": the answer with two neighbouring characters exchanged."""
    margin: str = ""
    """The row's key that says by how much the better one's score should be above the other's; "": by any."""
    reward: rl.RewardTrainingConfig
    """Its model is a policy's, which is given a head, or one that judges already."""
    loss: rl.BradleyTerryLoss = rl.BradleyTerryLoss()
    rows: int = 64
    """Pairs a step."""
    steps: int = 200


async def reward_model(run: rl.Run, config: RewardModelRunConfig) -> None:
    task = rl.Task.load(config.task)
    model = await run.spawn(rl.RewardModel, config.reward)

    async def scored(batch: rl.Batch) -> rl.Batch:
        pairs = rl.answer_pairs(batch, rl.rejected_answers(batch, config.rejected))
        pairs = pairs.assign(least_margins=rl.least_margins(pairs, config.margin))
        return await rl.score_columns(await model.token_scores(await model.encode(pairs)))

    async def held_out() -> dict[str, float]:
        return rl.score_metrics(await scored(task.held_out))

    before = await run.once("before", held_out)
    rows = task.batches(config.rows, run.seed)
    async for _ in run.steps(config.steps):
        pairs = await scored(next(rows))
        await run.record(await model.update(pairs, config.loss), None, **rl.score_metrics(pairs))

    after = await held_out()
    await model.save(str(run.folder / "model"))
    run.summary(
        **{f"held_out_{name}_before": value for name, value in before.items()},
        **{f"held_out_{name}_after": value for name, value in after.items()},
    )
