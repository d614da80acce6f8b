"""Your own role: an actor with endpoints, on two ranks, which a training loop calls.

    python examples/role.py

`Lexicon` is the role. The marks of its abstract endpoints say how a batch is split over ranks, and how results are
joined. `WordList` implements it with plain types. The loop lowers the reward of completions with unknown words. The
other roles are fakes, so the example takes a second and needs no model.
"""

import asyncio
from abc import ABC, abstractmethod

import numpy as np

import meshrl as rl
from meshrl import Actor, Batch, Gather, Shard, Sum, endpoint


class Lexicon(Actor, ABC):
    """Knows which words exist."""

    @endpoint
    @abstractmethod
    async def check(self, batch: Shard[Batch]) -> Gather[Batch]:
        """Add `unknown`, int64: the number of unknown words in the row's `completion`."""

    @endpoint
    @abstractmethod
    async def checked(self) -> Sum[int]:
        """Return the number of checked rows, on all ranks together."""


class WordList(Lexicon):
    """A lexicon that is a list of words. Each rank has a copy."""

    def __init__(self, words: list[str]) -> None:
        self._words = frozenset(words)
        self._checked = 0

    async def check(self, batch: Batch) -> Batch:
        """Runs on each rank, with that rank's rows."""
        self._checked += len(batch)
        texts = [str(text).split() for text in batch.objects("completion")]
        return batch.assign(unknown=np.array([len(set(text) - self._words) for text in texts], np.int64))

    async def checked(self) -> int:
        """Return the number of this rank only. The mark sums the ranks' numbers."""
        return self._checked


async def main() -> None:
    """Train a fake policy for a few steps."""
    rows = [{"question": f"What comes after {word}?", "answer": "and"} for word in ("one", "two", "three", "four")]
    task = rl.Task.of(rows)
    async with rl.Run(rl.RunConfig(name="role")) as run:
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(model="none", backend="fake"))
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(model="none", backend="fake"))
        lexicon = await (await run.mesh(2)).spawn(WordList, ["and", "or", "not"])  # typed as a WordList
        prompts = task.batches(4, run.seed)
        async for _ in run.steps(12):
            await rl.publish(policy, sampler)
            batch = await lexicon.check(await rl.rollout(sampler, next(prompts), rl.Sampling(n=4)))
            batch = batch.assign(rewards=-batch.row("unknown").astype(np.float32))
            batch = batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups))
            await run.record(await policy.update(batch, rl.ClippedLoss(clip=0.2)), batch)
            print(f"{batch.row('unknown').sum()} unknown words in {len(batch)} rows")
        print(f"{await lexicon.checked()} rows checked")


if __name__ == "__main__":
    asyncio.run(main())
