"""Checks of sampling: the model's tokens, their log-probs, and reproducibility by the seed."""

import asyncio
from math import inf
from typing import Final

import numpy as np

from meshrl.data import Batch, Source
from meshrl.errors import DataError
from meshrl.roles import Sampling
from meshrl.run import BesideSampling
from meshrl.testing.conformance import samples
from meshrl.testing.conformance.compare import equal, refused
from meshrl.testing.conformance.samples import (
    ERROR,
    OLD,
    begun,
    completions,
    drawn,
    most_probable,
    policy_of,
    questions,
)
from meshrl.testing.conformance.subject import Check, Trial
from meshrl.testing.invariant_checker import require

_DRAWS: Final = 400
"""Draws of one token. In two of three cases its frequency is within 0.025 of its probability."""
_FREQUENCY_ERROR: Final = 0.12


async def greedy(trial: Trial) -> None:
    """Completions at temperature 0 are the plain backend's most probable tokens, with and without tied embeddings."""
    for tied in (True, False):
        rollouts = await drawn(await samples.unused(trial, tied), questions(7), Sampling(max_tokens=10, temperature=0))
        await most_probable(f"greedy, with a head that is {'' if tied else 'not '}tied", trial, rollouts, OLD, tied)


async def sampler_log_probs(trial: Trial) -> None:
    """`sampler_logprobs` are the plain backend's at the row's temperature, and their source is the sampler."""
    sampler, policy = await begun(trial), await policy_of(trial)
    for temperature in (1.0, 0.6, 1.7, 0.0):
        what = f"`sampler_logprobs` at temperature {temperature:g}"
        rollouts = await drawn(sampler, questions(9), Sampling(max_tokens=16, temperature=temperature))
        equal(f"the source of {what}", rollouts.sampler_logprobs.source, Source("sampler"))
        wanted = float(np.float32(temperature or 1.0))
        equal(f"`temperature` with {what}", set(rollouts.row("temperature").tolist()), {wanted})
        await samples.same_log_probs(what, policy, rollouts)


async def frequencies(trial: Trial) -> None:
    """Frequencies of tokens match the plain backend's probabilities, at several temperatures.

    An unsupported temperature is a DataError that contains it, and the sampler continues.
    """
    sampler, policy = await begun(trial), await policy_of(trial)
    prompts = questions(5).select([4])
    prefix = samples.ids_of(str(prompts.objects("prompt")[0]))
    lowest, highest = trial.subject.temperatures
    for strange in {lowest / 2, highest * 2} - {0, inf}:
        call = samples.rest(sampler.generate(prompts, Sampling(temperature=strange)))
        await refused(f"the temperature {strange:g}", call, DataError, f"{strange:g}")
    for temperature in (max(0.25, lowest), 1.0, min(4.0, highest)):
        sampling = Sampling(n=_DRAWS, max_tokens=1, temperature=temperature)
        tokens = np.concatenate(completions(await drawn(sampler, prompts, sampling)))
        expected = np.exp(await samples.next_tokens(trial, policy, [prefix], temperature))[0]
        shares = np.bincount(tokens, minlength=len(expected)) / _DRAWS
        worst = int(np.abs(shares - expected).argmax())
        require(
            bool(abs(shares[worst] - expected[worst]) <= _FREQUENCY_ERROR),
            f"at temperature {temperature:g} token {worst} is {shares[worst]:.2f} of {_DRAWS} draws, and its "
            f"probability is {expected[worst]:.2f}",
        )


async def restricted_draws(trial: Trial) -> None:
    """`top_k` and `top_p` restrict the draws, and `sampler_logprobs` are those of the whole distribution.

    So a policy with the same weights, which always uses the whole distribution, has the ratio 1 on its own rows. An
    unsupported restriction is a DataError.
    """
    sampler, policy = await begun(trial), await policy_of(trial)
    one = questions(5).select([4])
    prefix = samples.ids_of(str(one.objects("prompt")[0]))
    for keys in ({"top_k": 2}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.9}):
        for temperature in (1.0, 0.6):
            what = f"at temperature {temperature:g} with {keys}"
            sampling = Sampling.model_validate({"max_tokens": 16, "temperature": temperature, **keys})
            if len(keys) > trial.subject.restrictions:
                await refused(f"a draw {what}", samples.rest(sampler.generate(one, sampling)), DataError, *keys)
                continue
            rollouts = await drawn(sampler, questions(9), sampling)
            await samples.same_log_probs(f"`sampler_logprobs` {what}", policy, rollouts)
            often = sampling.model_copy(update={"n": _DRAWS // 4, "max_tokens": 1})
            tokens = np.concatenate(completions(await drawn(sampler, one, often)))
            probabilities = np.exp(await samples.next_tokens(trial, policy, [prefix], temperature))[0]
            allowed = _allowed(probabilities, sampling)
            strange = sorted({*tokens.tolist()} - allowed)
            require(not strange, f"{what} the tokens {strange} are drawn, which are not among {sorted(allowed)}")


def _allowed(probabilities: samples.Floats, sampling: Sampling) -> set[int]:
    """The tokens that may be drawn: the `top_k` most probable, and of these the fewest that reach `top_p`."""
    order = np.argsort(-probabilities, kind="stable")[: sampling.top_k or None]
    shares = probabilities[order] / probabilities[order].sum()
    before = np.cumsum(shares) - shares
    return {*order[before < sampling.top_p + ERROR].tolist()}


async def seeds(trial: Trial) -> None:
    """After a load, a used sampler draws like a new one with the same `Sampling.seed`, and differently with another."""
    used, weights = await begun(trial), await samples.weights_of(trial, OLD)
    prompts = questions(30)
    await drawn(used, prompts, Sampling(max_tokens=3))
    tokens: list[list[list[int]]] = []
    for sampler, seed in ((used, 5), (await samples.unused(trial), 5), (used, 6)):
        await sampler.load(weights)
        tokens.append(completions(await drawn(sampler, prompts, Sampling(max_tokens=12, seed=seed))))
    _same_tokens("by the seed 5, a new sampler and a used one", *tokens[:2])
    require(tokens[0] != tokens[2], "the seeds 5 and 6 give the same tokens in all of 30 rows")


async def calls_beside(trial: Trial) -> None:
    """Calls with `sampling.beside` draw, and do not change the draws of other calls."""
    sampler, prompts, weights = await begun(trial), questions(20), await samples.weights_of(trial, OLD)
    tokens: list[list[list[int]]] = []
    for beside in (0, 2):
        await sampler.load(weights)
        for _ in range(beside):
            await drawn(sampler, prompts, BesideSampling(max_tokens=6))
        tokens.append(completions(await drawn(sampler, prompts, Sampling(max_tokens=12))))
    _same_tokens("before and after two calls with `sampling.beside`, a call and another", *tokens)


def _same_tokens(what: str, actual: list[list[int]], expected: list[list[int]]) -> None:
    differ = sum(one != other for one, other in zip(actual, expected, strict=True))
    require(not differ, f"{what} give other tokens in {differ} of {len(expected)} rows")


async def completions_of_a_prompt(trial: Trial) -> None:
    """The `n` completions of a prompt are drawn independently: at temperature 1 some differ."""
    prompts = questions(4)
    rollouts = await drawn(await begun(trial), prompts, Sampling(n=24, max_tokens=12))
    for number in range(len(prompts)):
        different = {tuple(each) for each in completions(rollouts.select(rollouts.groups == number))}
        require(len(different) > 1, f"all 24 completions of prompt {number} are the same")


async def calls_together(trial: Trial) -> None:
    """Rows of concurrent calls are drawn together, and stay with their calls."""
    sampler, prompts, calls = await begun(trial), questions(10), ([0, 1, 2], [3])
    parts = [sampler.generate(prompts.select(rows), Sampling(max_tokens=8, temperature=0)) for rows in calls]
    streams = await asyncio.gather(*map(samples.rest, parts))
    for actual, numbers in zip(streams, calls, strict=True):
        equal(f"the prompts of a call for {numbers}", sorted(actual.groups.tolist()), numbers)
    await most_probable("greedy, in two calls together", trial, Batch.concat(streams))


MODEL: Final[tuple[Check, ...]] = (greedy, sampler_log_probs, frequencies, restricted_draws, calls_together)
ANY: Final[tuple[Check, ...]] = (seeds, calls_beside, completions_of_a_prompt)
