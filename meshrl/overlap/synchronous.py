"""Operations on a sampler: generate rollouts, publish new weights, and compute a greedy baseline."""

from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch, Weights, unlearned
from meshrl.errors import DataError
from meshrl.events import Swap, sink
from meshrl.overlap.replay import load_into
from meshrl.overlap.replicas import outlive
from meshrl.overlap.stream import Rollouts
from meshrl.overlap.stream_state import Score
from meshrl.roles import Policy, Sampler, Sampling

_DRAWN: Final = ("completion", "tokens", "loss_mask", "sampler_logprobs", "versions")
"""Columns that a sampler adds to a prompt, and that it would read as the start of a completion."""


async def rollout(sampler: Sampler, prompts: Batch, sampling: Sampling) -> Batch:
    """Generate all rollouts of the prompts, in order. The `sampling.n` completions of a prompt are adjacent.

    Raises DataError if the sampler returned another number of rows, or if a stream on the same sampler aborted some.
    """
    tagged = prompts.part(np.arange(len(prompts)))

    async def draw() -> list[Batch]:
        return [chunk async for chunk in sampler.generate(tagged, sampling)]

    stream = next((each for each in Rollouts.live if each.feeds_on(sampler)), None)
    if stream:
        await stream.loaded()
    drawn = stream.producer.replicas.outlive(draw, len(prompts)) if stream else outlive(sampler, draw)
    done = Batch.join(await drawn)
    if "aborted" in done and bool(np.any((await done.load("aborted")).row("aborted"))):
        raise DataError(
            'a stream with swap="abort" on the same sampler aborted rollouts: draw these when no stream is open, or '
            "from another sampler"
        )
    if len(done) != len(prompts) * sampling.n:
        raise DataError(
            f"the sampler returned {len(done)} rollouts for {len(prompts)} prompts x {sampling.n} completions"
        )
    return done


async def publish(
    policy: Policy, *samplers: Sampler | Rollouts, adapter: str | None = None, name: str | None = None
) -> Weights:
    """Send the policy's weights to the samplers, and return the weights. Tokens drawn by them carry their version.

    `adapter`: send this one alone. Rows that name it continue with the new weights. `name`: its name at the samplers,
    if it is another one: rows that name this version keep it until the sampler drops it.

    With a stream of rollouts, pass the stream instead, once for each batch: `await publish(policy, stream)`. It counts
    the publications and passes the weights on to its sampler. With `ahead` of 1 or more and `swap="in_flight"` the
    script continues while the sampler loads them: `await stream.loaded()` waits. From the stream's first batch on,
    weights are of one adapter, or the whole model's: DataError for others. Raises DataError for the sampler of an open
    stream.
    """
    to = sink.get()
    requested = to.now() if to else 0.0
    for sampler in samplers:
        if any(stream.feeds_on(sampler) for stream in Rollouts.live):
            raise DataError("the sampler feeds a stream of rollouts, which counts versions: publish to the stream")
    with ExitStack() as announced:
        for sampler in samplers:
            if isinstance(sampler, Rollouts):
                announced.enter_context(sampler.announced())
        weights = await (policy.weights() if adapter is None else policy.weights(adapter))
        if name is not None:
            weights = weights.named(name)
        for sampler in samplers:
            note, began = partial(_note_swap, weights, requested), to.now() if to else 0.0
            if isinstance(sampler, Rollouts):
                await sampler.load(weights, note)
            else:
                await outlive(sampler, partial(load_into, sampler, weights))
                note(began)
    return weights


def _note_swap(weights: Weights, requested: float, began: float) -> None:
    if to := sink.get():
        to.emit(Swap(weights.version, requested, began, to.now(), weights.nbytes))


async def greedy_baseline(sampler: Sampler, batch: Batch, sampling: Sampling, score: Score) -> Batch:
    """Add `baseline`, float32[rows]: the reward of the greedy completion of the row's prompt, decoded once per group.

    If it is unknown, NaN, the group's `loss_mask` becomes False. For use in the `score` of a stream, whose rows are
    finished groups. ReMax: Li et al. 2023 (arXiv:2310.10505).
    """
    batch = await batch.load("groups")
    _, first, group = np.unique(batch.groups, return_index=True, return_inverse=True)
    prompts = batch.drop(*(name for name in _DRAWN if name in batch)).select(first)
    greedy = await rollout(sampler, prompts, sampling.model_copy(update={"n": 1, "temperature": 0.0}))
    scored = await (await score(greedy)).load("rewards")
    batch = batch.assign(baseline=scored.rewards[group])
    unknown = np.isnan(batch.row("baseline"))
    if unknown.any() and "loss_mask" in batch:
        batch = unlearned(await batch.load("loss_mask"), unknown)
    return batch


def has_signal(batch: Batch) -> NDArray[np.bool_]:
    """Mark rows of groups with different known rewards, bool[rows]. In other groups all advantages are zero.

    To replace the prompts of the other groups: `rollouts(..., keep=has_signal)`. DAPO (arXiv:2503.14476), section 3.2.
    """
    _, group = np.unique(batch.groups, return_inverse=True)
    lowest = np.full(group.max(initial=-1) + 1, np.inf)
    highest = -lowest
    known = ~np.isnan(batch.rewards)
    np.minimum.at(lowest, group[known], batch.rewards[known])
    np.maximum.at(highest, group[known], batch.rewards[known])
    return (highest > lowest)[group]
