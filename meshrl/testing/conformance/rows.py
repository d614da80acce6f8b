"""Checks of a sampler's rows: their columns, ends, number, and continuation."""

import asyncio
from collections.abc import Mapping
from typing import Final

import numpy as np

from meshrl.data import Batch, Ragged
from meshrl.roles import Sampling
from meshrl.testing.conformance import samples
from meshrl.testing.conformance.compare import equal
from meshrl.testing.conformance.samples import NEW, OLD, begun, completions, drawn, most_probable, questions, text_of
from meshrl.testing.conformance.subject import Check, Trial
from meshrl.testing.invariant_checker import require

_TOKENS: Final[Mapping[str, type[np.generic]]] = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "sampler_logprobs": np.float32,
    "versions": np.int32,
}
_ROWS: Final[Mapping[str, type[np.generic]]] = {
    "oldest_version": np.int32,
    "temperature": np.float32,
    "truncated": np.bool_,
    "aborted": np.bool_,
}
_TASK: Final = ("prompt", "answer", "groups", "row", "difficulty")


async def columns(trial: Trial) -> None:
    """Rows have all columns of a rollout with their dtypes, each token's version, and the columns of their prompts."""
    sampler = await begun(trial)
    prompts = questions(11, difficulty=np.linspace(0, 1, 11, dtype=np.float32))
    rollouts = await drawn(sampler, prompts, Sampling(n=2, max_tokens=8))
    for name in _TASK:
        require(name in rollouts, f"the prompts' column `{name}` is not in their rollouts: they have {rollouts.names}")
        same = rollouts.only(name) == prompts.repeat(2).only(name)
        require(same, f"the column `{name}` of the prompts is not that of their rollouts")
    _well_formed(rollouts, OLD)
    require(not rollouts.row("aborted").any(), "rows are `aborted` in a call that nobody aborted")


async def tokens_of_texts(trial: Trial) -> None:
    """Rows begin with their prompt's tokens, and `completion` is the text of the tokens after them."""
    rollouts = await drawn(await begun(trial), questions(9), Sampling(max_tokens=12))
    for row, (text, tokens) in enumerate(zip(rollouts.objects("completion"), completions(rollouts), strict=True)):
        equal(f"`completion` of row {row}, whose tokens are {tokens},", text, text_of(tokens))
        prompt = rollouts.tokens[row][: len(rollouts.tokens[row]) - len(tokens)].tolist()
        equal(f"the beginning of row {row}", prompt, samples.ids_of(str(rollouts.objects("prompt")[row])))


async def ends_of_rows(trial: Trial) -> None:
    """A completion ends at the model's end token, or is `truncated` at its limit. A row's `max_tokens` comes first."""
    sampler, end = await begun(trial), (await trial.pair()).end
    prompts = questions(12)
    limits = np.array([1, 2, 3, 5, 8, 13] * 2)
    for what, some, sampling, wanted in (
        ("`Sampling.max_tokens`", prompts, Sampling(max_tokens=6), np.full(12, 6)),
        ("`max_tokens` of the rows", prompts.assign(max_tokens=limits), Sampling(max_tokens=4), limits),
    ):
        rollouts = await drawn(sampler, some, sampling)
        for row, tokens in enumerate(completions(rollouts)):
            limit, truncated = int(wanted[row]), bool(rollouts.row("truncated")[row])
            ended = tokens[-1:] == [end]
            case = f"with {what} {limit}, row {row} has the completion {tokens} and `truncated` {truncated}"
            require(1 <= len(tokens) <= limit, f"{case}: it has from 1 to {limit} tokens")
            require(end not in tokens[:-1], f"{case}: it continues after the end token {end}")
            require(ended or len(tokens) == limit, f"{case}: it stops before its limit, and not at the end token {end}")
            require(truncated is not ended, f"{case}: a row is truncated where it has no end token")
    rollouts = await drawn(sampler, prompts, Sampling(max_tokens=20, ignore_eos=True))
    equal("the lengths with `ignore_eos` and 20 tokens", {len(tokens) for tokens in completions(rollouts)}, {20})


async def stop_texts(trial: Trial) -> None:
    """A stop text ends a row: `completion` is cut before it, its tokens are kept, and the row is not `truncated`."""
    sampler, prompts = await begun(trial), questions(10)
    sampling = Sampling(max_tokens=16, temperature=0, ignore_eos=True)
    free = await drawn(sampler, prompts, sampling)
    texts = [str(text) for text in free.objects("completion")]
    stop = (texts[0][3:5], texts[1][2:3])
    stopped = await drawn(sampler, prompts, sampling.model_copy(update={"stop": stop}))
    for row, (whole, tokens) in enumerate(zip(completions(free), completions(stopped), strict=True)):
        ends = _ends(whole, stop)
        expected = whole[: ends[0] if ends else 16]
        text = text_of(expected)
        cut = min((text.find(each) for each in stop if each in text), default=len(text))
        case = f"of row {row}, whose text without stop texts is {texts[row]!r}, with the stop texts {stop},"
        equal(f"the list of tokens {case}", tokens, expected)
        equal(f"`completion` {case}", stopped.objects("completion")[row], text[:cut])
        equal(f"`truncated` {case}", bool(stopped.row("truncated")[row]), not ends)


def _ends(tokens: list[int], stop: tuple[str, ...], start: int = 1) -> list[int]:
    """The lengths from `start` on at which tokens contain a stop text."""
    lengths = range(start, len(tokens) + 1)
    return [length for length in lengths if any(each in text_of(tokens[:length]) for each in stop)]


async def rows_that_go_on(trial: Trial) -> None:
    """Rows with tokens continue after them, and keep their log-probs and versions. `max_tokens` counts all of it."""
    sampler, prompts = await begun(trial), questions(8)
    begin = await drawn(sampler, prompts, Sampling(max_tokens=3, temperature=0, ignore_eos=True))
    await sampler.load((await samples.weights_of(trial, OLD)).with_version(NEW))
    limits = np.array([3, 4, 7, 12, 9, 9, 9, 9])
    whole = await drawn(sampler, begin.assign(max_tokens=limits), Sampling(temperature=0, ignore_eos=True))
    equal("the lengths of continued rows", [len(tokens) for tokens in completions(whole)], limits.tolist())
    for row in range(len(prompts)):
        had = len(begin.tokens[row])
        for name in _TOKENS:
            actual, expected = whole.ragged(name)[row][:had].tolist(), begin.ragged(name)[row].tolist()
            equal(f"the beginning of `{name}` of the continued row {row}", actual, expected)
        newer = set(whole.versions[row][had:].tolist())
        require(newer <= {NEW}, f"tokens that row {row} was given by version {NEW} have the versions {newer}")
    equal("`oldest_version` of continued rows", whole.row("oldest_version").tolist(), [OLD] * len(prompts))
    await most_probable("greedy rows that continued", trial, whole)


async def stop_texts_of_rows_that_go_on(trial: Trial) -> None:
    """A continued row ends where a stop text is complete, even if it began in the tokens that the row had."""
    sampler, had, prompts = await begun(trial), 3, questions(10)
    free = Sampling(max_tokens=16, temperature=0, ignore_eos=True)
    begin = await drawn(sampler, prompts, free.model_copy(update={"max_tokens": had}))
    ahead = completions(await drawn(sampler, prompts, free))
    across = [(text_of(tokens[had - 1 : had + 1]), text_of(tokens[:had])) for tokens in ahead]
    stop = tuple(text for text, earlier in across if len(text) == 2 and text not in earlier)[:2]
    require(bool(stop), "this model gives no row a text to stop at: the check shows nothing")
    whole = await drawn(sampler, begin, free.model_copy(update={"stop": stop}))
    lengths: set[int] = set()
    for row, tokens in enumerate(completions(whole)):
        ends = _ends(tokens, stop, had)
        case = f"row {row}, continued after {had} tokens with the stop texts {stop}, has the text {text_of(tokens)!r}"
        require(ends in ([], [len(tokens)]), f"{case}: it continues after a stop text")
        equal(f"{case}: `truncated`", bool(whole.row("truncated")[row]), not ends)
        lengths |= set(ends)
    require(had + 1 in lengths, f"no row ends with its first new token, at a stop text that began before: {lengths}")


async def rows_that_have_ended(trial: Trial) -> None:
    """Rows that have ended are yielded unchanged, whatever weights came since."""
    sampler = await begun(trial)
    sampling = Sampling(max_tokens=8)
    once = await drawn(sampler, questions(9), sampling)
    await sampler.load(await samples.weights_of(trial, NEW))
    again = await drawn(sampler, once, sampling)
    for name in (*_TOKENS, *_ROWS, "completion"):
        same = again.only(name) == once.only(name)
        require(same, f"rows that had ended come back with another `{name}`: {again[name]}, and it was {once[name]}")


async def few_rows(trial: Trial) -> None:
    """No prompts give no rows, one prompt one row, on any number of ranks. An empty batch has a rollout's columns."""
    sampler = await begun(trial)
    for count in (0, 1, 0):
        rollouts = await drawn(sampler, questions(count), Sampling(max_tokens=4))
        equal(f"the number of rows of {count} prompts", len(rollouts), count)
        wanted = (*_TASK[:3], *_TOKENS, *_ROWS, "completion") if count or rollouts.names else ()
        missing = [name for name in wanted if name not in rollouts]
        require(not missing, f"the rollouts of {count} prompts lack the columns {', '.join(missing)}")


async def more_rows_than_slots(trial: Trial) -> None:
    """Ten times more rows than slots, in three concurrent calls, all come, each once."""
    sampler, prompts = await begun(trial), questions(40)
    streams = [sampler.generate(prompts.select(np.arange(call, 40, 3)), Sampling(max_tokens=4)) for call in range(3)]
    for call, actual in enumerate(await asyncio.gather(*map(samples.rest, streams))):
        equal(f"the rows of call {call} of three", sorted(actual.groups.tolist()), list(range(call, 40, 3)))
        _well_formed(actual, OLD)


def _well_formed(rollouts: Batch, version: int) -> None:
    """Require a rollout's columns, with tokens that one version drew."""
    for name, dtype in {**_TOKENS, **_ROWS}.items():
        require(name in rollouts, f"rollouts lack the column `{name}`: they have {', '.join(rollouts.names)}")
        column = rollouts[name]
        kind, what = (Ragged, "token") if name in _TOKENS else (np.ndarray, "row")
        require(isinstance(column, kind), f"`{name}` is a {type(column).__name__}, not a column by {what}")
        equal(f"the dtype of `{name}`", getattr(column, "dtype", None), np.dtype(dtype))
    texts = rollouts.objects("completion")
    require(all(isinstance(text, str) for text in texts), f"`completion` is not text in each row: {texts[:3]}")
    for row, mask in enumerate(rollouts.loss_mask):
        flags = np.asarray(mask, np.bool_)
        start = int(flags.argmax())
        right = bool(flags.any() and flags[start:].all())
        require(right, f"`loss_mask` of row {row} is {flags.tolist()}: it is False in a prompt, and True after it")
        expected = [-1] * start + [version] * (len(flags) - start)
        equal(f"`versions` of row {row}", rollouts.versions[row].tolist(), expected)
        before = rollouts.sampler_logprobs[row][:start]
        require(not before.any(), f"`sampler_logprobs` of the prompt of row {row} are {before.tolist()}, not 0")
    oldest = set(rollouts.row("oldest_version").tolist())
    require(oldest <= {version}, f"`oldest_version` is {oldest} where all tokens are of version {version}")


MODEL: Final[tuple[Check, ...]] = (
    tokens_of_texts,
    ends_of_rows,
    stop_texts,
    rows_that_go_on,
    stop_texts_of_rows_that_go_on,
)
ANY: Final[tuple[Check, ...]] = (columns, rows_that_have_ended, few_rows, more_rows_than_slots)
