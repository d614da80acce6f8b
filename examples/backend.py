"""Your own backend: a policy and a sampler in about 60 lines, whose model is a table. GRPO teaches it to count.

    python examples/backend.py

A prompt is a digit. The table says how likely each digit follows each other digit. The sampler takes any number of
calls, and new weights and aborts between two rows. In a package, `ROLES = {"Policy": "mine.policy:TablePolicy"}` and an
entry point let a configuration say `policy.backend = "mine"` (docs/tour.md). Needs `pip install torch`.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import meshrl as rl
from meshrl import Batch, LossResult, Metrics, Ragged, Sampling, Step, Weights
from meshrl.algo import Loss, check_predicts, check_sources, spread, token_weights
from meshrl.data import Source
from meshrl.mesh import current_rank
from meshrl.roles import Completion, SteppingSampler, completed


class TablePolicy(rl.Policy):
    """Ten rows of ten logits: a digit's row has those of the next digit."""

    def __init__(self, config: rl.PolicyConfig) -> None:
        self.table, self.version = torch.zeros(10, 10, requires_grad=True), 0
        self.added: list[tuple[Batch, Loss]] = []

    async def encode(self, batch: Batch) -> Batch:
        texts = [f"{row[0]}{row[1]}" for row in zip(batch.objects("prompt"), batch.objects("completion"), strict=True)]
        tokens = Ragged.of([list(map(int, text)) for text in texts], np.int32)
        return batch.assign(tokens=tokens, loss_mask=Ragged.of([np.arange(len(row)) > 0 for row in tokens], np.bool_))

    async def forward_backward(self, batch: Batch, loss: Loss) -> LossResult:
        """So small a model computes its gradients in `step`, from the rows."""
        check_predicts(loss, "logprobs")
        check_sources(batch, loss, self.version)
        losses = torch.zeros(len(batch.tokens.values))
        losses[torch.tensor(batch.loss_mask.values)] = self._losses(batch, loss).detach()
        self.added.append((batch, loss))
        columns = (await self.logprobs(batch)).only("logprobs")
        return LossResult(columns.assign(losses=Ragged(losses.numpy(), batch.tokens.offsets)), Metrics({}))

    async def step(self, optimizer: Step | None = None, adapter: str | None = None) -> Metrics:
        added, self.added = self.added, []
        tokens, rows = sum(batch.loss_mask.values.sum() for batch, _ in added), sum(len(batch) for batch, _ in added)
        total = torch.zeros(())
        for batch, loss in added:
            mask = batch.loss_mask
            weights = token_weights(mask, loss.normalise, tokens=tokens, rows=rows, constant=loss.constant)
            total = total + self._losses(batch, loss) @ torch.tensor(weights[np.asarray(mask.values, np.bool_)])
        self.table.data -= 20 * torch.autograd.grad(total, self.table)[0]
        self.version += 1
        return Metrics.of(loss=(total.item(), 1))

    def _losses(self, batch: Batch, loss: Loss) -> torch.Tensor:
        learned = np.flatnonzero(batch.loss_mask.values)
        columns = {name: torch.tensor(spread(batch, name, learned)) for name in loss.columns}
        return loss(self._logprobs(batch)[learned], columns).values

    def _logprobs(self, batch: Batch) -> torch.Tensor:
        tokens = torch.tensor(batch.tokens.values)
        return self.table.log_softmax(1)[tokens.roll(1), tokens]  # meaningless for prompts, which are not learned

    async def logprobs(self, batch: Batch) -> Batch:
        values = self._logprobs(batch).detach().numpy()
        return batch.assign(logprobs=Ragged(values, batch.tokens.offsets, source=Source.trainer(self.version)))

    async def weights(self, adapter: str | None = None) -> Weights:
        return Weights(self.version, {"table": self.table.detach().numpy()})

    async def save(self, folder: str, adapter: str | None = None) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        np.savez(Path(folder, "table.npz"), table=self.table.detach().numpy(), version=self.version)

    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        await self.save(folder)

    async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
        with np.load(Path(folder, "table.npz")) as saved:
            self.table.data, self.version = torch.tensor(saved["table"]), int(saved["version"])


class TableSampler(SteppingSampler):
    """Draws a row in each decode step, at temperature 1 or 0."""

    def __init__(self, config: rl.SamplerConfig) -> None:
        self.table, self.version = np.full((10, 10), np.log(0.1), np.float32), 0
        self.seeds = (config.seed, current_rank().index)

    async def load(self, weights: Weights) -> Batch:
        async with self.generate_calls.loading() as places:
            table = torch.tensor(weights.tensors["table"])
            self.table, self.version = table.log_softmax(1).numpy(), weights.version
        return places

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        rows = prompts.repeat(sampling.n)
        if "tokens" in rows:  # from an earlier call: those that have a completion stay as they are
            ended = np.array([mask.any() for mask in rows.loss_mask], np.bool_)
            yield rows.select(ended).assign(aborted=np.zeros(ended.sum(), np.bool_))
            rows = rows.select(~ended)
        async with self.generate_calls.begin(sampling.beside) as call:
            random = np.random.default_rng([*self.seeds, sampling.seed, self.version, abs(call.turn)])
            for number in range(len(rows)):
                row, size = rows.select([number]), sampling.max_tokens if await call.step() else 0
                noise = random.gumbel(size=(size, 10)) * (sampling.temperature > 0)
                yield completed(row, [self._draw(str(row.objects("prompt")[0]), noise)], self.version, sampling)

    def _draw(self, prompt: str, noise: NDArray[np.float64]) -> Completion:
        """A digit for each row of Gumbel noise, which makes the largest log-prob a sample."""
        digits = [int(prompt)]
        for each in noise:
            digits.append(int((self.table[digits[-1]] + each).argmax()))
        logprobs = [float(self.table[pair]) for pair in pairwise(digits)]
        text, aborted = "".join(map(str, digits[1:])), not len(noise)
        return Completion(text, digits[:1], digits[1:], logprobs, truncated=not aborted, aborted=aborted)


def judge(prompt: str, completion: str, row: Mapping[str, object]) -> float:
    """The reward: the share of digits that are one more than the digit before."""
    return float(np.mean([int(after) - int(before) == 1 for before, after in pairwise(prompt + completion)]))


async def main() -> None:
    """GRPO, with rollouts that overlap training."""
    task = rl.Task.of([{"question": str(digit), "answer": ""} for digit in range(6)])
    async with rl.Run(rl.RunConfig(name="counting")) as run:
        policy = await (await run.mesh(1)).spawn(TablePolicy, rl.PolicyConfig(model="none"))
        sampler = await (await run.mesh(2)).spawn(TableSampler, rl.SamplerConfig(model="none"))
        reward = await run.spawn(rl.Reward, rl.RewardConfig(function=judge))
        await rl.publish(policy, sampler)
        prompts, sampling = task.batches(6, run.seed), rl.Sampling(n=16, max_tokens=4)
        async with rl.rollouts(sampler, prompts, sampling, ahead=1, score=reward.score) as stream:
            async for _ in run.steps(40):
                batch = await (await anext(stream)).load("rewards", "groups")
                batch = batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups))
                metrics = await policy.update(batch, rl.ClippedLoss(clip=0.2))
                await rl.publish(policy, stream)
                await run.record(metrics, batch)
                print(f"{batch.rewards.mean():.0%} are right")
        counted = await rl.rollout(sampler, next(prompts), rl.Sampling(temperature=0.0, max_tokens=4))
        print(f"greedy completions: {' '.join(sorted(map(str, counted.objects('completion'))))}")


if __name__ == "__main__":
    asyncio.run(main())
