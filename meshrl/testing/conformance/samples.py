"""Samples for the checks of samplers, judged by policies of the plain backend with the same model."""

from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch, Ragged, Weights
from meshrl.errors import DataError, RankDied
from meshrl.mesh import Array, respawn
from meshrl.roles import Policy, Sampler, Sampling
from meshrl.testing.conformance.compare import close, equal, scores
from meshrl.testing.conformance.material import SAMPLED, SLOTS
from meshrl.testing.conformance.subject import Trial
from meshrl.testing.invariant_checker import require

Floats: TypeAlias = NDArray[np.float64]

OLD: Final = 1
"""Version of the first weights. A sampler that has loaded none has 0."""
NEW: Final = 4
"""Version of the weights that checks load later."""

ERROR: Final = 1e-4
"""Largest difference in float32 between a sampler's and a policy's log-probs. It computes row by row, with a cache."""

_TEXTS: Final = ("abc>", "h>", "abcdefgh>", "bad>", "c")
_SPECIAL: Final = 2
"""Tokens before those of the model's characters."""


def questions(rows: int, **columns: Array) -> Batch:
    """Prompts with their numbers as `groups`, and further columns. A sampler without a model may give the answer."""
    texts = [_TEXTS[row % len(_TEXTS)] for row in range(rows)]
    task = [{"number": row} for row in range(rows)]
    answers = [chr(ord("a") + row % 8) for row in range(rows)]
    return Batch.of(prompt=texts, answer=answers, groups=np.arange(rows), row=task, **columns)


async def begun(trial: Trial, tied: bool = True) -> Sampler:
    """A sampler with the weights `OLD`, which earlier checks may have used."""
    sampler, weights = await trial.sampler(tied), await weights_of(trial, OLD, tied)
    try:
        await sampler.load(weights)
    except RankDied:  # a check has killed a rank of the mesh
        await respawn(sampler)
        await sampler.load(weights)
    return sampler


async def unused(trial: Trial, tied: bool = True) -> Sampler:
    """A new sampler with its folder's weights, those of `OLD`, which has loaded none."""
    return await trial.own.sampler(model=(await trial.pair(tied)).old, slots=SLOTS)


async def weights_of(trial: Trial, version: int, tied: bool = True) -> Weights:
    """The weights of the sampler's folder as `OLD`, or those of the pair's other model as `NEW`."""
    given = trial.subject.weights
    weights = await (await policy_of(trial, version, tied)).weights() if given is None else given
    return (await weights.load()).with_version(version)


async def policy_of(trial: Trial, version: int = OLD, tied: bool = True) -> Policy:
    """A policy of the plain backend with the weights of `OLD` or `NEW`."""
    pair = await trial.pair(tied)
    return await trial.plain.policy(model=pair.old if version == OLD else pair.new)


async def drawn(sampler: Sampler, prompts: Batch, sampling: Sampling) -> Batch:
    """All rollouts of prompts with `groups`, in their order. Each must come `sampling.n` times."""
    return in_order(await rest(sampler.generate(prompts, sampling)), prompts, sampling.n)


async def rest(stream: AsyncIterable[Batch]) -> Batch:
    """The remaining rows of a stream, loaded into this process."""
    return Batch.concat([await part.load() async for part in stream])


async def first(stream: AsyncIterator[Batch]) -> Batch:
    """The first rows of a stream, loaded into this process."""
    async for part in stream:
        if len(part):
            return await part.load()
    raise DataError("the stream of rollouts ended before any came: give it prompts")


def in_order(rollouts: Batch, prompts: Batch, n: int = 1) -> Batch:
    """The rollouts in the order of their prompts. Each must have come `n` times."""
    require(len(rollouts) > 0 or not len(prompts), f"of {len(prompts)} prompts no rollout came")
    if not len(prompts):
        return rollouts
    require("groups" in rollouts, f"rollouts lack the column `groups` of their prompts: they have {rollouts.names}")
    counts = dict(zip(*(each.tolist() for each in np.unique(rollouts.groups, return_counts=True)), strict=True))
    wrong = [number for number in prompts.groups.tolist() if counts.get(number, 0) != n]
    number = wrong[0] if wrong else 0
    require(
        not wrong,
        f"of prompt {number} {counts.get(number, 0)} rollouts came, not {n}, and {len(wrong)} of {len(prompts)} "
        "prompts have too few or too many: each row is yielded once, whatever waits, stops or continues",
    )
    equal(f"the number of rollouts of {len(prompts)} prompts, {n} of each,", len(rollouts), n * len(prompts))
    return rollouts.select(np.argsort(rollouts.groups, kind="stable"))


def learned(rollouts: Batch) -> NDArray[np.bool_]:
    """Which of all tokens belong to completions, bool[tokens]."""
    return np.asarray(rollouts.loss_mask.values, np.bool_)


def completions(rollouts: Batch) -> list[list[int]]:
    """The tokens of each row's completion."""
    return [
        row[np.asarray(mask, np.bool_)].tolist() for row, mask in zip(rollouts.tokens, rollouts.loss_mask, strict=True)
    ]


def ids_of(text: str) -> list[int]:
    """The tokens of a text for the models of a pair."""
    return [SAMPLED.characters.index(character) + _SPECIAL for character in text]


def text_of(tokens: Sequence[int]) -> str:
    """The text of tokens for the models of a pair. Special tokens have none."""
    return "".join(SAMPLED.characters[token - _SPECIAL] for token in tokens if token >= _SPECIAL)


async def same_log_probs(what: str, policy: Policy, rollouts: Batch) -> None:
    """Require that `sampler_logprobs` of completions are the policy's log-probs."""
    mask = learned(rollouts)
    close(what, rollouts.sampler_logprobs.values[mask], (await scores(policy, rollouts)).values[mask], ERROR)


async def most_probable(what: str, trial: Trial, rollouts: Batch, version: int = OLD, tied: bool = True) -> None:
    """Require that each token of the completions is the most probable one of a version, as in greedy generation.

    By induction: if the previous tokens are those of greedy generation, the most probable token is the next one.
    """
    places = [
        (row, place)
        for row, mask in enumerate(rollouts.loss_mask)
        for place in np.flatnonzero(np.asarray(mask, np.bool_)).tolist()
    ]
    require(bool(places), f"{what}: no row has a completion")
    policy = await policy_of(trial, version, tied)
    table = await next_tokens(trial, policy, [rollouts.tokens[row][:place] for row, place in places])
    actual = np.array([rollouts.tokens[row][place] for row, place in places])
    behind = table.max(1) - table[np.arange(len(places)), actual]
    worst = int(behind.argmax())
    row, place = places[worst]
    prompt = str(rollouts.objects("prompt")[row])[:20]
    require(
        bool(behind[worst] <= ERROR),
        f"{what}: token {place} of row {row} ({prompt!r}) is {actual[worst]}, of log-prob "
        f"{table[worst, actual[worst]]:.4f}, and token {table[worst].argmax()} has {table[worst].max():.4f}; so it is "
        f"at {int((behind > ERROR).sum())} of {len(places)} tokens: greedy generation takes the most probable one",
    )


async def next_tokens(
    trial: Trial, policy: Policy, prefixes: Sequence[Array | Sequence[int]], temperature: float = 1.0
) -> Floats:
    """The log-probs of the next tokens, float64[prefixes, vocabulary]. Each prefix is scored as a separate row."""
    vocabulary = (await trial.pair()).vocabulary
    rows = [np.append(prefix, token) for prefix in prefixes for token in range(vocabulary)]
    masks = [np.arange(len(row)) == len(row) - 1 for row in rows]
    batch = Batch.of(
        tokens=Ragged.of(rows, np.int32),
        loss_mask=Ragged.of(masks, np.bool_),
        temperature=np.full(len(rows), temperature, np.float32),
    )
    scored = await scores(policy, batch)
    last = np.asarray(scored.values[scored.offsets[1:] - 1], np.float64)
    return last.reshape(len(prefixes), vocabulary)
