"""Checks of interruptions of a sampler: new weights, an abort, a cancelled call."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from typing import Final

import numpy as np

from meshrl.data import Batch, Weights
from meshrl.errors import DataError, ModelError
from meshrl.mesh import Array
from meshrl.roles import Sampler, Sampling
from meshrl.testing.conformance.compare import close, equal, refused, scores
from meshrl.testing.conformance.material import SLOTS
from meshrl.testing.conformance.samples import (
    ERROR,
    NEW,
    OLD,
    begun,
    completions,
    drawn,
    first,
    in_order,
    most_probable,
    policy_of,
    questions,
    rest,
    same_log_probs,
    unused,
    weights_of,
)
from meshrl.testing.conformance.subject import Check, Trial
from meshrl.testing.invariant_checker import PromiseBroken, require

_ROWS: Final = 12
_LONG: Final = Sampling(max_tokens=120, ignore_eos=True)
"""With `_ROWS` rows and few slots, hundreds of steps remain when the first row arrives."""
_CALLS: Final = 8
"""Consecutive calls with `_ROWS` rows for which weights may wait at most."""
_LOADS: Final = 8
"""At least one of these loads must find a row in progress."""


async def a_cancelled_call(trial: Trial) -> None:
    """Calls that are cancelled or abandoned, as many as there are slots, free their slots: later calls end."""
    sampler = await begun(trial)
    prompts = _long_rows()
    for _ in range(SLOTS // 2):
        task = asyncio.ensure_future(rest(sampler.generate(prompts, _LONG)))
        try:
            await drawn(sampler, questions(1), Sampling(max_tokens=1))  # the other call has begun by then
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        abandoned = sampler.generate(prompts, _LONG)
        await first(abandoned)
        if isinstance(abandoned, AsyncGenerator):
            await abandoned.aclose()
    await drawn(sampler, questions(3 * SLOTS), Sampling(max_tokens=6))
    if trial.subject.weights is None:
        rollouts = await drawn(sampler, questions(3 * SLOTS), Sampling(max_tokens=6, temperature=0))
        await most_probable("greedy after cancelled calls", trial, rollouts)


async def an_abort(trial: Trial) -> None:
    """`abort` ends a call: unfinished rows are yielded `aborted`, and a later call continues them."""
    sampler = await begun(trial)
    prompts = _long_rows()
    sampling = _LONG.model_copy(update={"temperature": 0.0})
    stream = sampler.generate(prompts, sampling)
    begin = await first(stream)
    await sampler.abort()
    rows = in_order(Batch.concat([begin, await rest(stream)]), prompts)
    aborted = np.asarray(rows.row("aborted"), np.bool_)
    require(bool(aborted.any()), "an abort after the first row leaves no row aborted: the call continued to its end")
    require(not aborted.all(), "all rows are `aborted`, also those that had come before the abort")
    require(not rows.row("truncated")[aborted].any(), "rows that were aborted are `truncated`: they have no end yet")
    whole = await drawn(sampler, rows, sampling)
    require(not whole.row("aborted").any(), "rows that an abort stopped are still `aborted` after they continued")
    for row in range(len(prompts)):
        had = rows.tokens[row].tolist()
        equal(f"the beginning of row {row}, aborted and continued,", whole.tokens[row][: len(had)].tolist(), had)
    if trial.subject.weights is None:
        lengths = [len(tokens) for tokens in completions(whole)]
        equal("the lengths of rows that were aborted and continued", lengths, prompts.row("max_tokens").tolist())
        await most_probable("greedy after an abort", trial, whole.select([1, 6, 11]))


async def versions_of_tokens(trial: Trial) -> None:
    """Weights may arrive during a call: the versions of a row's tokens never fall, and the oldest is reported.

    Weights are loaded repeatedly until one call has tokens of both versions: a server that gets no CPU time may load
    them between two calls.
    """

    def both_in_a_call(calls: Sequence[Batch]) -> bool:
        rows = Batch.concat(calls)
        for row, versions in enumerate(_versions(rows)):
            case = f"the tokens of row {row} have the versions {versions.tolist()}"
            require(set(versions.tolist()) <= {OLD, NEW}, f"{case}, and the sampler had {OLD}, then {NEW}")
            require(bool((np.diff(versions) >= 0).all()), f"{case}: they fall")
            equal(f"{case}, and `oldest_version`", int(rows.row("oldest_version")[row]), int(versions.min()))
        kinds = [set(np.concatenate(_versions(call)).tolist()) for call in calls]
        require(OLD in kinds[0], f"no token has version {OLD}, whose weights drew the rows that came before the load")
        return {OLD, NEW} in kinds

    without = (
        f"no call has tokens of the versions {OLD} and {NEW}: weights that come in the middle of one wait for its end"
    )
    await _load_until(trial, both_in_a_call, without)


async def numbers_around_a_load(trial: Trial) -> None:
    """Each token has the log-prob of its version's weights, also in a row that is in progress during a load.

    Such a row may keep what it has read with the old weights, or read it again. So its tokens after the load are only
    checked not to be drawn by the old ones. Weights are loaded repeatedly until a load finds a row in progress: a
    server that gets no CPU time may report neither tokens nor aborts before its rows have ended.
    """

    def both_in_a_row(calls: Sequence[Batch]) -> bool:
        return any({*versions.tolist()} == {OLD, NEW} for call in calls for versions in _versions(call))

    without = "no row has tokens of both versions: weights wait for the rows that are being drawn"
    rows = Batch.concat(await _load_until(trial, both_in_a_row, without))
    versions_of = [set(each.tolist()) for each in _versions(rows)]
    old, new = [await scores(await policy_of(trial, version), rows) for version in (OLD, NEW)]
    differences: list[float] = []
    for row, versions in enumerate(versions_of):
        actual, by_token, mask = rows.sampler_logprobs[row], rows.versions[row], rows.loss_mask[row].astype(np.bool_)
        before, after = mask & (by_token == OLD), mask & (by_token == NEW)
        close(f"row {row}: log-probs of version {OLD}", actual[before], old[row][before], ERROR)
        if versions == {NEW}:
            close(f"row {row}: log-probs of version {NEW}", actual[after], new[row][after], ERROR)
        elif len(versions) == 2:
            turn = int(after.argmax())
            differences.append(abs(float(actual[turn]) - float(old[row][turn])))
    require(
        max(differences) > ERROR,
        f"of {len(differences)} rows the first token of version {NEW} has the log-prob of version {OLD}: weights count "
        "as loaded before they are",
    )
    require({NEW} in versions_of, f"no row was drawn by version {NEW} alone: rows that wait begin with the new weights")


async def greedy_after_a_load(trial: Trial) -> None:
    """After a load, greedy completions are the new weights', with and without tied embeddings, at once and later."""
    for tied in (True, False):
        sampler = await begun(trial, tied)
        await drawn(sampler, questions(6), Sampling(max_tokens=4))
        _, later = await _with_new_weights(sampler, await weights_of(trial, NEW, tied))
        what = f"greedy after a load, with a head that is {'' if tied else 'not '}tied"
        await most_probable(what, trial, later, NEW, tied)
        await sampler.load((await weights_of(trial, OLD, tied)).with_version(NEW + 1))
        back = await drawn(sampler, questions(6), Sampling(max_tokens=8, temperature=0))
        await most_probable(f"{what}, back at the first weights", trial, back, OLD, tied)


async def a_prompt_that_was_read_before(trial: Trial) -> None:
    """After a load, a prompt is read again: nothing that the old weights computed is used."""
    sampler = await begun(trial)
    prompts = questions(3).assign(prompt=["abcdefgh" * 30 + ">", "abcdefgh" * 30 + "ab>", "hgfedcba" * 20])
    sampling = Sampling(max_tokens=3, temperature=0)
    before = await drawn(sampler, prompts, sampling)
    await drawn(sampler, prompts, sampling)  # now certainly from a cache, if there is one
    await most_probable("greedy before the load", trial, before)
    await sampler.load(await weights_of(trial, NEW))
    after = await drawn(sampler, prompts, sampling)
    await most_probable("greedy after the load", trial, after, NEW)
    await same_log_probs("log-probs after a prompt that was read before", await policy_of(trial, NEW), after)


async def weights_of_another_model(trial: Trial) -> None:
    """Weights with a missing or unknown tensor, or another shape or dtype, are a ModelError that names it.

    None of them is taken, and the sampler continues.
    """
    sampler = await begun(trial)
    tensors = dict((await weights_of(trial, NEW)).tensors)
    name, array = next((name, array) for name, array in tensors.items() if array.ndim == 2)
    others = {key: value for key, value in tensors.items() if key != name}
    for what, wrong, word in (
        ("weights that lack a tensor", others, name),
        ("weights with a strange tensor", {**tensors, "strange.weight": array}, "strange.weight"),
        ("weights with a tensor of another shape", {**tensors, name: array[:-1]}, name),
        ("weights with a tensor of another dtype", {**tensors, name: array.astype(np.float64)}, name),
    ):
        await refused(what, sampler.load(Weights(NEW, wrong)), ModelError, word)
        rows = await drawn(sampler, questions(4), Sampling(max_tokens=6, temperature=0))
        equal(f"`oldest_version` after {what} were refused", set(rows.row("oldest_version").tolist()), {OLD})
    await most_probable("greedy after refused weights", trial, rows)


async def a_replay(trial: Trial) -> None:
    """A sampler with a record takes weights where the earlier one did, whenever they arrive: rows are the same.

    A sampler that cannot repeat a record refuses it with a DataError, and continues.
    """
    weights = [await weights_of(trial, version) for version in (OLD, NEW)]
    prompts = _long_rows()
    if not trial.subject.replays:
        sampler, used = await unused(trial), await begun(trial)
        last = await used.load(weights[0])
        record = last.assign(load=np.zeros(len(last), np.int64))  # as if it had been the first load
        await refused("a record", sampler.replay(record), DataError, "record")
        await drawn(sampler, questions(3), Sampling(max_tokens=6))
        return
    sampler = await unused(trial)
    places = [await sampler.load(weights[0])]
    stream = sampler.generate(prompts, _LONG)
    begin = await first(stream)
    places.append(await sampler.load(weights[1]))
    rows = in_order(Batch.concat([begin, await rest(stream)]), prompts)
    again = await unused(trial)
    await again.replay(Batch.concat(places))
    await again.load(weights[0])
    _, same = await asyncio.gather(again.load(weights[1]), drawn(again, prompts, _LONG))  # long before its place
    for name in ("versions", "tokens", "sampler_logprobs"):
        pairs = zip(same.ragged(name), rows.ragged(name), strict=True)
        differ = sum(one.tolist() != other.tolist() for one, other in pairs)
        require(not differ, f"a sampler that repeats a record gives {differ} of {_ROWS} rows other `{name}`")


def _long_rows() -> Batch:
    """Prompts whose first row ends at once and the others late."""
    return questions(_ROWS, max_tokens=np.array([2, *[30, 60, 90, 120] * _ROWS][:_ROWS]))


async def _with_new_weights(sampler: Sampler, weights: Weights) -> tuple[list[Batch], Batch]:
    """The rows of each call, some with new weights in the middle, and the rows of a greedy call after them.

    Two calls run at a time, repeatedly until the weights are loaded, so that some rows run and others wait.
    """
    prompts = _long_rows()
    stream = sampler.generate(prompts, _LONG)
    begin = await first(stream)
    load = asyncio.ensure_future(sampler.load(weights))

    async def call(stream: AsyncIterable[Batch]) -> list[Batch]:
        rows = [await rest(stream)]
        while not load.done() and len(rows) < _CALLS:
            rows.append(await rest(sampler.generate(prompts, _LONG)))
        return rows

    one, other, _ = await asyncio.gather(call(stream), call(sampler.generate(prompts, _LONG)), load)
    one[0] = Batch.concat([begin, one[0]])
    return one + other, await drawn(sampler, questions(8), Sampling(max_tokens=8, temperature=0))


async def _load_until(trial: Trial, shown: Callable[[Sequence[Batch]], bool], without: str) -> Sequence[Batch]:
    """Repeat a load until `shown` accepts the rows of its calls, and return them. `without`: else the error."""
    weights = await weights_of(trial, NEW)
    for _ in range(_LOADS):
        calls, _ = await _with_new_weights(await begun(trial), weights)
        if shown(calls):
            return calls
    raise PromiseBroken(f"after {_LOADS} loads {without}")


def _versions(rows: Batch) -> list[Array]:
    """The versions of each row's sampled tokens."""
    return [versions[np.asarray(mask, np.bool_)] for mask, versions in zip(rows.loss_mask, rows.versions, strict=True)]


MODEL: Final[tuple[Check, ...]] = (
    numbers_around_a_load,
    greedy_after_a_load,
    a_prompt_that_was_read_before,
    weights_of_another_model,
)
ANY: Final[tuple[Check, ...]] = (a_cancelled_call, an_abort, versions_of_tokens, a_replay)
