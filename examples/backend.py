"""Your own backend: a policy and a sampler whose model has one number for each digit.

    python examples/backend.py

The policy learns to answer 7. Its update accepts any policy-gradient loss. Its sampler accepts any number of calls, new
weights between two steps, and aborts. In a package, `ROLES = {"Policy": "mine.policy:DigitPolicy"}` and an entry point
let a configuration say `policy.backend = "mine"` (docs/tour.md). Needs `pip install torch`.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike

import meshrl as rl
from meshrl import Batch, Metrics, Ragged, Sampling, Weights
from meshrl.data import Source, is_ragged
from meshrl.losses import Loss, check_predicts, check_sources, token_weights
from meshrl.mesh import Array, current_rank
from meshrl.roles import GenerateCalls


class DigitPolicy(rl.Policy):
    """Ten logits. A row has one token, the sampled digit."""

    def __init__(self, config: rl.PolicyConfig) -> None:
        self.logits = torch.zeros(10, requires_grad=True)
        self.optimizer = torch.optim.SGD([self.logits], lr=2.0)
        self.version = 0

    async def encode(self, batch: Batch) -> Batch:
        digits = np.array([int(str(text)) for text in batch.objects("completion")], np.int32)
        learned = [True] * len(batch)
        return batch.assign(tokens=per_row(digits, np.int32, batch), loss_mask=per_row(learned, np.bool_, batch))

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        check_predicts(loss, "logprobs")
        check_sources(batch, loss, self.version)
        n = len(batch)
        columns = {name: torch.tensor(of_tokens(batch, name)) for name in loss.columns}
        weights = token_weights(batch.loss_mask, loss.normalise, tokens=n, rows=n, constant=loss.constant)
        total = (torch.tensor(weights) * loss(self._logprobs(batch), columns).values).sum()
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()
        self.version += 1
        return Metrics.of(loss=(total.item() * n, n))

    def _logprobs(self, batch: Batch) -> torch.Tensor:
        return self.logits.log_softmax(0)[torch.tensor(batch.tokens.values)]

    async def logprobs(self, batch: Batch) -> Batch:
        logprobs, source = self._logprobs(batch).detach().numpy(), Source.trainer(self.version)
        return batch.assign(logprobs=per_row(logprobs, np.float32, batch, source))

    async def weights(self) -> Weights:
        return Weights(self.version, {"logits": self.logits.detach().numpy()})

    async def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        np.savez(Path(folder, "digits.npz"), logits=self.logits.detach().numpy(), version=self.version)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        await self.save(folder)

    async def restore(self, folder: str) -> None:
        with np.load(Path(folder, "digits.npz")) as saved:
            self.logits.data.copy_(torch.tensor(saved["logits"]))
            self.version = int(saved["version"])


class DigitSampler(rl.Sampler):
    """Samples digits, one row in each decode step. New weights arrive between two steps."""

    def __init__(self, config: rl.SamplerConfig) -> None:
        self.logits, self.version = np.zeros(10, np.float32), 0
        self.random = np.random.default_rng([config.seed, current_rank().index])
        self.calls = GenerateCalls()

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        rows = prompts.repeat(sampling.n)
        if "tokens" in rows:  # aborted rows come back, and those with a digit are done
            ended = rows.tokens.lengths > 0
            yield rows.select(ended)
            rows = rows.select(~ended)
        async with self.calls.begin(sampling.beside) as call:
            for number in range(len(rows)):
                if not await call.step():
                    yield self._described(rows.select(np.arange(number, len(rows))), [], sampling)
                    break
                yield self._described(rows.select([number]), [self._draw(sampling.temperature)], sampling)

    def _draw(self, temperature: float) -> int:
        noise = self.random.gumbel(size=10) if temperature else 0.0
        return int(np.argmax(self.logits / (temperature or 1) + noise))

    def _described(self, rows: Batch, digits: list[int], sampling: Sampling) -> Batch:
        """Return the rows with a digit each, or without digits if they were aborted."""
        temperature = sampling.temperature or 1.0
        logprobs = torch.tensor(self.logits / temperature).log_softmax(0).numpy()
        versions = [self.version] * len(rows)
        return rows.assign(
            completion=[str(digit) for digit in digits] or [""] * len(rows),
            tokens=per_row(digits, np.int32, rows),
            loss_mask=per_row([True] * len(digits), np.bool_, rows),
            sampler_logprobs=per_row(logprobs[digits], np.float32, rows, Source("sampler")),
            versions=per_row(versions[: len(digits)], np.int32, rows),
            oldest_version=np.array(versions, np.int32),
            temperature=np.full(len(rows), temperature, np.float32),
            truncated=np.zeros(len(rows), np.bool_),
            aborted=np.full(len(rows), not digits),
        )

    async def load(self, weights: Weights) -> Batch:
        async with self.calls.loading() as places:
            self.logits, self.version = np.asarray(weights.tensors["logits"], np.float32), weights.version
        return places

    async def replay(self, record: Batch) -> None:
        self.calls.replay(record)

    async def abort(self) -> None:
        await self.calls.abort()


def per_row(values: ArrayLike, dtype: DTypeLike, rows: Batch, source: Source | None = None) -> Ragged:
    """Make a token column with one value for each row, or with none."""
    array = np.asarray(values, dtype)
    return Ragged(array, np.arange(len(rows) + 1) if len(array) else np.zeros(len(rows) + 1), source=source)


def of_tokens(batch: Batch, name: str) -> Array:
    """Return a column for a loss: one value for each token, which is one for each row here."""
    return batch.ragged(name).values if is_ragged(batch[name]) else batch.row(name)


def judge(prompt: str, completion: str, row: Mapping[str, object]) -> float:
    """The reward."""
    return float(completion == row["answer"])


async def main() -> None:
    """GRPO, with rollouts that overlap training."""
    task = rl.Task.of([{"question": f"{number}?", "answer": "7"} for number in range(16)])
    async with rl.Run(rl.RunConfig(name="digits")) as run:
        policy = await (await run.mesh(1)).spawn(DigitPolicy, rl.PolicyConfig(model="none"))
        sampler = await (await run.mesh(2)).spawn(DigitSampler, rl.SamplerConfig(model="none"))
        reward = await run.spawn(rl.Reward, rl.RewardConfig(function=judge))
        await rl.publish(policy, sampler)
        prompts, sampling = task.batches(8, run.seed), rl.Sampling(n=4)
        async with rl.rollouts(sampler, prompts, sampling, ahead=1, score=reward.score) as stream:
            async for _ in run.steps(30):
                batch = await (await anext(stream)).load("rewards", "groups")
                batch = batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups))
                metrics = await policy.update(batch, rl.ClippedLoss(clip=0.2))
                await rl.publish(policy, stream)
                await run.record(metrics, batch)
                print(f"{batch.rewards.mean():.0%} are right")
        answers = await rl.rollout(sampler, next(prompts), rl.Sampling(temperature=0.0))
        print(f"greedy answers: {sorted({str(text) for text in answers.objects('completion')})}")


if __name__ == "__main__":
    asyncio.run(main())
