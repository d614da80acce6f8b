"""A process reward model, from texts whose steps are labelled right or wrong (arXiv:2305.20050, arXiv:2312.08935).

Score each step at its last token: above 0 if it is more likely right than wrong. No pairs are needed. The saved model
can be the `model` of another run's `[reward]`, which gives a text the score of its last step.

    meshrl run process_reward/quickstart
"""

import meshrl as rl


class ProcessRewardConfig(rl.AlgorithmConfig):
    task: rl.TaskConfig
    completion: str = "completions"
    """Key of a row's steps, a list of texts. "": each character of the answer is a step, with errors in every second
    row."""
    labels: str = "labels"
    """Key of the steps' labels: true, false, or the probability that a step is right."""
    reward: rl.RewardTrainingConfig
    """The model to train: a language model, which gets a new head, or a reward model."""
    loss: rl.ProcessLoss = rl.ProcessLoss()
    rows: int = 64
    """Texts in a training step."""
    steps: int = 200  # training steps

    def examples(self, rows: rl.Batch) -> rl.Batch:
        """Return each row's steps and their labels."""
        return rl.labelled_steps(rows, self.completion, self.labels)


async def process_reward(run: rl.Run, config: ProcessRewardConfig) -> None:
    task = rl.Task.load(config.task)
    model = await run.spawn(rl.RewardModel, config.reward)

    async def labelled(batch: rl.Batch) -> rl.Batch:
        return await rl.with_labels(await model.encode(config.examples(batch)))

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
