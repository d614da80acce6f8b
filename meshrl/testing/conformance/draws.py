"""Checks of sampling: the model's tokens, their log-probs, and reproducibility by the seed."""

import asyncio
from math import inf
from typing import Final

import numpy as np

from meshrl.data import Batch, Source
from meshrl.errors import DataError
from meshrl.roles import Sampling
from meshrl.run.evaluation import BesideSampling
from meshrl.testing.conformance.compare import close, refused, require
from meshrl.testing.conformance.samples import (
    ERROR,
    Floats,
    begun,
    completions,
    drawn,
    ids_of,
    most_probable,
    next_token,
    old_weights,
    questions,
    rest,
    scores,
    unused,
)
from meshrl.testing.conformance.subject import Check, Trial

_DRAWS: Final = 400
"""Draws of one token. In two of three cases its frequency is within 0.025 of its probability."""
_FREQUENCY_ERROR: Final = 0.12


async def greedy(trial: Trial) -> None:
    """Completions at temperature 0 are the plain backend's most probable tokens, with and without tied embeddings."""
    for tied in (True, False):
        pair = await trial.pair(tied)
        sampler = await unused(trial, tied)
        rollouts = await drawn(sampler, questions(7), Sampling(max_tokens=10, temperature=0))
        policy = await trial.plain.policy(model=pair.old)
        await most_probable(f"greedy, with a head that is {'' if tied else 'not '}tied", policy, pair, rollouts)


async def sampler_log_probs(trial: Trial) -> None:
    """`sampler_logprobs` are the plain backend's at the row's temperature, and their source is the sampler."""
    sampler = await begun(trial)
    policy = await trial.plain.policy(model=(await trial.pair()).old)
    for temperature in (1.0, 0.6, 1.7, 0.0):
        what = f"`sampler_logprobs` at temperature {temperature:g}"
        rollouts = await drawn(sampler, questions(9), Sampling(max_tokens=16, temperature=temperature))
        found = rollouts.sampler_logprobs
        require(found.source == Source("sampler"), f"{what} come from {found.source}, not {Source('sampler')}")
        told = set(rollouts.row("temperature").tolist())
        wanted = float(np.float32(temperature or 1.0))
        require(told == {wanted}, f"rows drawn at temperature {temperature:g} tell {told}, not {wanted:g}")
        mask = np.asarray(rollouts.loss_mask.values, np.bool_)
        close(what, found.values[mask], (await scores(policy, rollouts)).values[mask], ERROR)


async def frequencies(trial: Trial) -> None:
    """Frequencies of tokens match the plain backend's probabilities, at several temperatures.

    An unsupported temperature is a DataError that contains it, and the sampler continues.
    """
    sampler, pair = await begun(trial), await trial.pair()
    policy = await trial.plain.policy(model=pair.old)
    prompts = questions(5).select([4])
    prefix = ids_of(str(prompts.objects("prompt")[0]))
    lowest, highest = trial.subject.temperatures
    for strange in {lowest / 2, highest * 2} - {0, inf}:
        call = rest(sampler.generate(prompts, Sampling(temperature=strange)))
        await refused(f"the temperature {strange:g}", call, DataError, f"{strange:g}")
    for temperature in (max(0.25, lowest), 1.0, min(4.0, highest)):
        sampling = Sampling(n=_DRAWS, max_tokens=1, temperature=temperature)
        tokens = np.concatenate(completions(await drawn(sampler, prompts, sampling)))
        shares = np.bincount(tokens, minlength=pair.vocabulary) / _DRAWS
        expected = np.exp(await next_token(policy, pair, prefix, temperature))
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
    sampler, pair = await begun(trial), await trial.pair()
    policy = await trial.plain.policy(model=pair.old)
    one = questions(5).select([4])
    prefix = ids_of(str(one.objects("prompt")[0]))
    for keys in ({"top_k": 2}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.9}):
        for temperature in (1.0, 0.6):
            what = f"at temperature {temperature:g} with {keys}"
            if len(keys) > trial.subject.restrictions:
                call = rest(sampler.generate(one, Sampling.model_validate({"temperature": temperature, **keys})))
                await refused(f"a draw {what}", call, DataError, *keys)
                continue
            sampling = Sampling.model_validate({"max_tokens": 16, "temperature": temperature, **keys})
            rollouts = await drawn(sampler, questions(9), sampling)
            mask = np.asarray(rollouts.loss_mask.values, np.bool_)
            wanted = (await scores(policy, rollouts)).values[mask]
            close(f"`sampler_logprobs` {what}", rollouts.sampler_logprobs.values[mask], wanted, ERROR)
            often = sampling.model_copy(update={"n": _DRAWS // 4, "max_tokens": 1})
            tokens = np.unique(np.concatenate(completions(await drawn(sampler, one, often))))
            kept = _kept(np.exp(await next_token(policy, pair, prefix, temperature)), sampling)
            strange = sorted({*tokens.tolist()} - kept)
            require(not strange, f"{what} the tokens {strange} are drawn, which are not among the kept {sorted(kept)}")


def _kept(probabilities: Floats, sampling: Sampling) -> set[int]:
    """The tokens that may be drawn: the `top_k` most probable, and of these the fewest that reach `top_p`."""
    order = np.argsort(-probabilities, kind="stable")[: sampling.top_k or None]
    shares = probabilities[order] / probabilities[order].sum()
    before = np.cumsum(shares) - shares
    return {*order[before < sampling.top_p + ERROR].tolist()}


async def seeds(trial: Trial) -> None:
    """After a load, a used sampler draws like a new one with the same `Sampling.seed`, and differently with another."""
    used, weights = await begun(trial), await old_weights(trial)
    prompts = questions(30)
    await drawn(used, prompts, Sampling(max_tokens=3))
    tokens: list[list[list[int]]] = []
    for sampler, seed in ((used, 5), (await unused(trial), 5), (used, 6)):
        await sampler.load(weights)
        tokens.append(completions(await drawn(sampler, prompts, Sampling(max_tokens=12, seed=seed))))
    differ = [row for row in range(30) if tokens[0][row] != tokens[1][row]]
    require(not differ, f"a used sampler and a new one give other tokens by the seed 5 in {len(differ)} of 30 rows")
    require(tokens[0] != tokens[2], "the seeds 5 and 6 give the same tokens in all of 30 rows")


async def calls_beside(trial: Trial) -> None:
    """Calls with `sampling.beside` draw, and do not change the draws of other calls."""
    sampler, prompts, weights = await begun(trial), questions(20), await old_weights(trial)
    tokens: list[list[list[int]]] = []
    for beside in (0, 2):
        await sampler.load(weights)
        for _ in range(beside):
            rows = await drawn(sampler, prompts, BesideSampling(max_tokens=6))
            require(
                len(rows) == len(prompts),
                f"a call with `sampling.beside` gave {len(rows)} rows for {len(prompts)} prompts",
            )
        tokens.append(completions(await drawn(sampler, prompts, Sampling(max_tokens=12))))
    differ = [row for row in range(20) if tokens[0][row] != tokens[1][row]]
    require(
        not differ, f"after two calls with `sampling.beside`, a call gives other tokens in {len(differ)} of 20 rows"
    )


async def completions_of_a_prompt(trial: Trial) -> None:
    """The `n` completions of a prompt are drawn independently: at temperature 1 some differ."""
    sampler = await begun(trial)
    prompts = questions(4)
    rollouts = await drawn(sampler, prompts, Sampling(n=24, max_tokens=12))
    for number in range(len(prompts)):
        mine = rollouts.select(rollouts.groups == number)
        different = {tuple(each) for each in completions(mine)}
        require(len(different) > 1, f"all 24 completions of prompt {number} are the same")


async def calls_together(trial: Trial) -> None:
    """Rows of concurrent calls are drawn together, and stay with their calls."""
    sampler, pair = await begun(trial), await trial.pair()
    prompts = questions(10)
    parts = [sampler.generate(prompts.select(rows), Sampling(max_tokens=8, temperature=0)) for rows in ([0, 1, 2], [3])]
    streams = await asyncio.gather(*map(rest, parts))
    for found, numbers in zip(streams, ([0, 1, 2], [3]), strict=True):
        require(sorted(found.groups.tolist()) == numbers, f"a call for rows {numbers} gives {found.groups.tolist()}")
    policy = await trial.plain.policy(model=pair.old)
    await most_probable("greedy, in two calls together", policy, pair, Batch.concat(streams))


MODEL: Final[tuple[Check, ...]] = (greedy, sampler_log_probs, frequencies, restricted_draws, calls_together)
"""Checks of draws from a model."""

ANY: Final[tuple[Check, ...]] = (seeds, calls_beside, completions_of_a_prompt)
"""Checks of any draws."""
