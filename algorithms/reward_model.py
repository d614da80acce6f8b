"""A reward model from pairs of completions of which one is better (arXiv:2203.02155).

Raise the score of the better completion above that of the worse one, by the Bradley-Terry model of preferences. The
answer of a row is the better one. What is saved is the `model` of another run's `[reward]`.

    meshrl run reward_model/quickstart
"""

from meshrl import (
    AlgorithmConfig,
    Batch,
    BradleyTerryLoss,
    RewardModel,
    RewardTrainingConfig,
    Run,
    Task,
    TaskConfig,
    answer_pairs,
    least_margins,
    rejected_answers,
    score_metrics,
    with_scores,
)


class RewardModelRunConfig(AlgorithmConfig):
    task: TaskConfig
    """`task.answer` is the template of the better completion, "{chosen}" for example."""
    rejected: str = "{rejected}"
    """`str.format` template of the worse one; "": the answer with two neighbouring characters exchanged."""
    margin: str = ""
    """The row's key that says by how much the better one's score should be above the other's; "": by any."""
    reward: RewardTrainingConfig
    """Its model is a policy's, which is given a head, or one that judges already."""
    loss: BradleyTerryLoss = BradleyTerryLoss()
    rows: int = 64
    """Pairs a step."""
    steps: int = 200


async def reward_model(run: Run, config: RewardModelRunConfig) -> None:
    task = Task.load(config.task)
    model = await run.spawn(RewardModel, config.reward)

    async def scored(batch: Batch) -> Batch:
        pairs = answer_pairs(batch, rejected_answers(batch, config.rejected))
        pairs = pairs.assign(least_margins=least_margins(pairs, config.margin))
        return await with_scores(model, await model.encode(pairs))

    async def held_out() -> dict[str, float]:
        return score_metrics(await scored(task.held_out))

    before = await run.once("before", held_out)
    rows = task.batches(config.rows, run.seed)
    async for _ in run.steps(config.steps):
        pairs = await scored(next(rows))
        await run.record(await model.update(pairs, config.loss), None, **score_metrics(pairs))

    after = await held_out()
    await model.save(str(run.folder / "model"))
    run.summary(
        **{f"held_out_{name}_before": value for name, value in before.items()},
        **{f"held_out_{name}_after": value for name, value in after.items()},
    )
