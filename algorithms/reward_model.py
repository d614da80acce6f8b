"""A reward model, from pairs of a better and a worse completion (arXiv:2203.02155).

Raise the score of the better completion above that of the worse one, by the Bradley-Terry model of preferences. A row's
answer is the better completion. The saved model can be the `model` of another run's `[reward]`.

    meshrl run reward_model/quickstart
"""

import meshrl as rl


class RewardModelRunConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    """The rows. `task.answer` is the template of the better completion, such as "{chosen}"."""
    rejected: str = "{rejected}"
    """Template of the worse completion, as for `str.format`. "": the answer with two neighbouring characters
    exchanged."""
    margin: str = ""
    """Key of a row's margin, by which the better score should exceed the other. "": no margin."""
    reward: rl.RewardTrainingConfig
    """The model to train: a language model, which gets a new head, or a reward model."""
    loss: rl.BradleyTerryLoss = rl.BradleyTerryLoss()
    rows: int = 64
    """Pairs in a step."""
    steps: int = 200  # training steps

    def examples(self, rows: rl.Batch) -> rl.Batch:
        """Return a pair of each row, and its margin."""
        pairs = rl.answer_pairs(rows, rl.rejected_answers(rows, self.rejected))
        return pairs.assign(least_margins=rl.least_margins(pairs, self.margin))


async def reward_model(run: rl.Run, config: RewardModelRunConfig) -> None:
    task = rl.Task.load(config.task)
    model = await run.spawn(rl.RewardModel, config.reward)

    async def scored(batch: rl.Batch) -> rl.Batch:
        return await rl.score_columns(await model.token_scores(await model.encode(config.examples(batch))))

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
