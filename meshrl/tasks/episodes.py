"""Episodes: a sampler and an environment that take turns, wrapped as one sampler.

    episodes = Episodes(sampler, environment, config.environment)
    async with rollouts(episodes, prompts, config.sampling, ahead=config.ahead) as stream:
        ...

All rows of a call take a turn together. The sampler samples, the environment answers, and episodes that are not over
continue after their tokens. The model's text is never encoded again, and the environment's text is not learned.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from meshrl.data import FINGERPRINTS, IMAGES, Batch, Images, OnError, Ragged, Source, Weights, names_in, with_rewards
from meshrl.errors import DataError
from meshrl.mesh import Array, parts, routed
from meshrl.roles import Sampler, Sampling
from meshrl.tags import opened_tag
from meshrl.tasks.environment import Environment, EnvironmentConfig

_RUNNING = ("observation", "turn_start")
"""Columns of running episodes: the text that the next turn begins with, and the number of tokens before that turn."""
_NEWEST = np.iinfo(np.int32).max


class Episodes(Sampler):
    """A sampler whose rows are whole episodes.

    A row's `tokens` are the first prompt, then the model's and the environment's texts in turn. `loss_mask` is True for
    the model's tokens only. On the environment's tokens, `sampler_logprobs` are 0 and `versions` are -1.
    `oldest_version` is that of the model's oldest token in any turn. Added columns: `rewards` (float32, the sum over
    turns, unknown if the environment raised), `reward_error`, `turns` (int32) and `episode` (int64). `prompt` is the
    result of `reset`, and `completion` is all text after it. A row is `truncated` if its last turn was, or if there was
    no turn or no room left for another one.

    `max_tokens` and `stop` apply to each turn. New weights may arrive between two turns, as between two tokens. It is a
    plain object in the script's process, which reads the token columns of each turn.
    """

    def __init__(self, sampler: Sampler, environment: Environment, config: EnvironmentConfig) -> None:
        self._sampler = sampler
        self._environment = environment
        self._turns = config.turns
        self._on_error: OnError = config.errors
        self._template = config.template
        self._begun = self._beside = 0
        self._aborts = 0

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield episodes as they end, those of a turn together. Rows that `abort` stopped continue where they were."""
        rows = (await prompts.load()).repeat(sampling.n)
        live, aborts = await self._begin(rows, sampling.beside), self._aborts
        if not len(live):
            yield live.assign(aborted=np.zeros(0, np.bool_))
        one = sampling.model_copy(update={"n": 1})
        while len(live):
            try:
                live = await self._draw(live, one)
                stopped = np.asarray(live.row("aborted"), np.bool_)
                aborted, live = live.select(stopped).drop("turn_text"), live.select(~stopped)
                if len(aborted):
                    yield aborted
                over, live = await self._answer(live)
                if len(over):
                    yield over
            except BaseException:  # also when cancelled: what an environment holds ends with its episode
                await self._on_its_rank(self._environment.close, live)
                raise
            if aborts != self._aborts and len(live) and not sampling.beside:
                yield live.assign(aborted=np.ones(len(live), np.bool_))
                return

    async def load(self, weights: Weights) -> Batch:
        """Give the sampler new weights."""
        return await self._sampler.load(weights)

    async def replay(self, record: Batch) -> None:
        """Replay the sampler. Overlapping calls take turns as their environments answer, which is not recorded."""
        await self._sampler.replay(record)

    async def abort(self) -> None:
        """Stop running turns. No episode begins another turn."""
        self._aborts += 1
        await self._sampler.abort()

    async def _begin(self, rows: Batch, beside: bool) -> Batch:
        """Give each row an environment. Rows that have one continue. Episodes outside training are -1, -2, ..."""
        if "episode" in rows and all(name in rows for name in _RUNNING):
            if len(np.unique(rows.row("episode"))) != len(rows):
                raise DataError("an episode cannot be continued twice: continue aborted rows with n = 1")
            return rows
        if beside:
            numbers = -1 - self._beside - np.arange(len(rows), dtype=np.int64)
            self._beside += len(rows)
        else:
            numbers = self._begun + np.arange(len(rows), dtype=np.int64)
            self._begun += len(rows)
        whole = rows.assign(episode=numbers, rewards=np.zeros(len(rows), np.float32))
        begun = await self._on_its_rank(self._environment.reset, whole)
        return _with_images(whole, begun, [names_in(str(text)) for text in begun.objects("prompt")]).assign(
            prompt=list(begun.objects("prompt")),
            reward_error=list(begun.objects("reward_error")),
            rewards=begun.rewards,
            turns=np.zeros(len(rows), np.int32),
            completion=[""] * len(rows),
            observation=[None] * len(rows),
            turn_start=np.zeros(len(rows), np.int64),
        )

    async def _draw(self, live: Batch, sampling: Sampling) -> Batch:
        """Sample a turn of each row, and add its text as `turn_text`. All before it is a prompt for the sampler."""
        request = Batch(dict(live.columns))  # without origins, which would overflow after many turns
        if "tokens" in live:
            start = np.repeat(np.asarray(live.row("turn_start"), np.int64), live.tokens.lengths)
            mask = _bools(live.loss_mask.values) & (_places(live.tokens) >= start)
            request = request.assign(loss_mask=Ragged(mask, live.tokens.offsets))
        request = request.part(np.arange(len(request)))
        drawn = Batch.join([chunk async for chunk in self._sampler.generate(request, sampling)])
        if len(drawn) != len(live):
            raise DataError(f"the sampler returned {len(drawn)} rows for a turn of {len(live)} episodes")
        drawn = await drawn.load()
        tokens, mask, versions = drawn.tokens, np.array(drawn.loss_mask.values, np.bool_), drawn.versions
        starts = [int(row.argmax()) if row.any() else len(row) for row in drawn.loss_mask]
        if "tokens" in live:
            had = _places(tokens) < np.repeat(live.tokens.lengths, tokens.lengths)
            mask[had] |= _bools(live.loss_mask.values)
        seen = {name: drawn[name] for name in (IMAGES, FINGERPRINTS) if name in drawn}
        return live.assign(
            **seen,
            tokens=tokens,
            loss_mask=Ragged(mask, tokens.offsets),
            sampler_logprobs=Ragged(drawn.sampler_logprobs.values, tokens.offsets, source=Source("sampler")),
            versions=versions,
            oldest_version=_oldest(versions, mask, drawn.row("oldest_version")),
            turn_text=list(drawn.objects("completion")),
            truncated=drawn.row("truncated"),
            temperature=drawn.row("temperature"),
            aborted=drawn.row("aborted"),
            turn_start=np.array(starts, np.int64),
            observation=[None] * len(live),
        )

    async def _answer(self, live: Batch) -> tuple[Batch, Batch]:
        """Send a turn to the environment. Returns the rows that are over, and those that continue."""
        broken = np.array([error is not None for error in live.objects("reward_error")], np.bool_)
        full = live.row("turn_start") == live.tokens.lengths  # the sampler had no room for another token
        sent = np.flatnonzero(~(broken | full))
        request = live.select(sent)
        answer = await self._on_its_rank(
            self._environment.step, request.assign(completion=list(request.objects("turn_text")))
        )
        done, rewards = np.ones(len(live), np.bool_), np.array(live.rewards)
        done[sent] = _bools(answer.row("done"))
        rewards[sent] += answer.rewards
        turns = np.array(live.row("turns"), np.int32)
        turns[sent] += 1
        errors, shown = list(live.objects("reward_error")), [""] * len(live)
        answers = zip(sent.tolist(), answer.objects("reward_error"), answer.objects("observation"), strict=True)
        for row, error, text in answers:
            errors[row], shown[row] = error, "" if done[row] else self._template.replace("{observation}", str(text))
        rewards[np.array([error is not None for error in errors], np.bool_) & ~np.isnan(rewards)] = 0
        late = ~done & (turns >= self._turns)
        texts = zip(live.objects("completion"), live.objects("turn_text"), shown, late.tolist(), strict=True)
        had = cast("Sequence[Sequence[str]]", live.columns.get(IMAGES) or [()] * len(live))
        ends = (done | late).tolist()
        names = [[*own, *names_in(text if not end else "")] for own, text, end in zip(had, shown, ends, strict=True)]
        after = (
            _with_images(live, answer, names)
            .assign(
                rewards=rewards,
                reward_error=errors,
                turns=turns,
                truncated=_bools(live.row("truncated")) | late,
                completion=[
                    _joined(str(before), str(turn)) + ("" if end else answer) for before, turn, answer, end in texts
                ],
                observation=shown,
                turn_start=live.tokens.lengths,
            )
            .drop("turn_text")
        )
        await self._on_its_rank(self._environment.close, after.select(late | full))
        over = done | late
        ended = after.select(over).drop(*_RUNNING)
        reasons = [cast("str | None", errors[row]) for row in np.flatnonzero(over).tolist()]
        return with_rewards(ended, ended.rewards, reasons, self._on_error), after.select(~over)

    async def _on_its_rank(self, call: Callable[[Batch], Awaitable[Batch]], rows: Batch) -> Batch:
        """Call the environment of each row on the episode's rank. Keeps the order."""
        request = Batch({name: column for name, column in rows.columns.items() if not isinstance(column, Ragged)})
        if not len(request):
            return request.assign(
                observation=[], rewards=np.zeros(0, np.float32), done=np.zeros(0, np.bool_), reward_error=[]
            )
        owners = np.asarray(request.row("episode"), np.int64) % parts(call)
        return await (await routed(call, owners)(request)).load()


def _with_images(rows: Batch, answer: Batch, names: Sequence[Sequence[str]]) -> Batch:
    """Return rows with the images of these names, which are theirs or an answer's. Unchanged if there are none."""
    known = [each for each in (rows.columns.get(IMAGES), answer.columns.get(IMAGES)) if isinstance(each, Images)]
    pool = {name: file for each in known for name, file in each.pool.items()}
    return rows.assign(images=Images(names, pool)) if any(names) or IMAGES in rows else rows


def _joined(before: str, turn: str) -> str:
    """Return a text with the next turn. A tag that the text leaves open is the turn's first word too."""
    return before + turn.removeprefix(opened_tag(before))


def _bools(values: Array) -> NDArray[np.bool_]:
    return np.asarray(values, np.bool_)


def _places(column: Ragged) -> NDArray[np.int64]:
    """Return the number of each token in its row, int64[tokens]."""
    return np.arange(len(column.values)) - np.repeat(column.offsets[:-1], column.lengths)


def _oldest(versions: Ragged, mask: NDArray[np.bool_], otherwise: Array) -> NDArray[np.int32]:
    """Return the oldest version of each row's learned tokens, int32[rows]. Rows without any get `otherwise`."""
    known = np.where(mask, versions.values, _NEWEST)
    oldest = np.minimum.reduceat(known, versions.offsets[:-1]) if len(versions) else np.zeros(0, np.int32)
    return np.where(oldest == _NEWEST, otherwise, oldest).astype(np.int32)
