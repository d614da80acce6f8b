"""Agents as a sampler: its rows are whole episodes, and it works wherever a sampler does.

agents = Agents(sampler, Agent(config.agent), gateway)
async with agents.serving(), rollouts(agents, prompts, config.sampling, ahead=config.ahead) as stream:
    async for batch in stream:                                    # a row an episode
        advantages = group_advantages(batch.rewards, batch.groups)
        rows = conversations(batch.assign(advantages=advantages))  # a row a conversation of an episode
        metrics = await policy.update(rows, config.loss)
        await publish(policy, stream)
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np

from meshrl import log
from meshrl.agents.agent import Agent, Episode
from meshrl.agents.gateway import Gateway
from meshrl.data import Batch, Ragged, Weights
from meshrl.overlap import Schedule, schedule
from meshrl.roles import ResumingSampler, Sampler, Sampling

_EPISODE: Final = "episode"


class _Played(NamedTuple):
    episode: Episode
    oldest_version: int
    """Oldest version of the episode's tokens. Without tokens, the version that would have drawn them."""


_Wire: TypeAlias = tuple[
    int,
    float,
    str | None,
    int,
    int,
    str,
    list[float],
    list[int],
    list[float],
    list[int],
    dict[str, float],
    bytes,
    list[bytes],
]
"""An episode in the run's record: the oldest version, the outcome in the order of `Episode`, and the rows."""


def _packed(played: _Played) -> bytes:
    episode = played.episode
    header, buffers = episode.rows.to_wire()
    outcome = (episode.reward, episode.error, episode.turns, episode.tries, episode.output)
    columns = (episode.turn_rewards, episode.turn_traces, episode.trace_rewards, episode.turn_seats)
    by_turn = (each.tolist() for each in columns)
    whole = (played.oldest_version, *outcome, *by_turn, episode.metrics, header, [*map(bytes, buffers)])
    return msgspec.msgpack.encode(whole)


def _unpacked(recorded: bytes) -> _Played:
    wire = msgspec.msgpack.decode(recorded, type=_Wire)
    oldest, reward, error, turns, tries, output, rewards, traces, of_trace, seats, metrics, header, buffers = wire
    by_turn = np.array(rewards, np.float32), np.array(traces, np.int32), np.array(of_trace, np.float32)
    of_seat = np.array(seats, np.int32)
    rows = Batch.from_wire(header, buffers)
    return _Played(Episode(rows, reward, error, turns, tries, output, *by_turn, of_seat, metrics), oldest)


class Agents(ResumingSampler):
    """A sampler whose rows are episodes. For each row of a prompt, the agent works on the task's row once.

    A row has its prompt's columns and `rewards`, `reward_error`, `oldest_version` (of all its tokens), `turns` (int32,
    number of answers), `turn_rewards`, `turn_traces`, `trace_rewards` and `turn_seats` (ragged, one per answer, as
    `Episode` has them), `agent_metrics` (the program's other numbers), `truncated` (true if an answer was cut short),
    `tries` (int32, number of times it was played), `completion` (its text, for people), `versions` (of the tokens of
    its conversations in order), `conversation_count` (int32), and `episode`. It has no `tokens`, because an agent may
    hold several conversations: `conversations` turns `episode` into rows.

    `sampling` applies to each answer. Weights can change between two answers or in the middle of one. A plain object,
    which lives in the script's process.
    """

    def __init__(self, sampler: Sampler, agent: Agent, gateway: Gateway) -> None:
        """`gateway` must serve the same sampler."""
        self._sampler = sampler
        self._agent = agent
        self._gateway = gateway
        self._version = 0

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Play during the block, with a server if the agent needs one. Its end cancels answers in progress."""
        if self._agent.needs_server:
            async with self._gateway.serving():
                yield
            return
        try:
            yield
        finally:
            await self._gateway.aclose()

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield episodes as they end."""
        rows = (await prompts.load()).repeat(sampling.n)
        record = None if sampling.beside or "groups" not in rows else schedule.get()
        playing = {asyncio.create_task(self._episode(rows, row, sampling, record)): row for row in range(len(rows))}
        if not playing:
            yield _with_episodes(rows, ())
        try:
            left = set(playing)
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                ended = sorted(done, key=playing.__getitem__)
                own = rows.select([playing[task] for task in ended])
                yield _with_episodes(own, [task.result() for task in ended])
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def load(self, weights: Weights) -> Batch:
        """Load new weights into the sampler. Interrupted answers continue."""
        try:
            places = await self._sampler.load(weights)
        finally:
            await self.resume()
        self._version = weights.version
        return places

    async def replay(self, record: Batch) -> None:
        """Replay the sampler's record if the run kept no episodes. With episodes, the sampler is not asked again."""
        current = schedule.get()
        if current is None or current.kept_rows is None:
            await self._sampler.replay(record)

    async def abort(self) -> None:
        """Interrupt the model's answers. Episodes stay, and their programs wait until new weights have come."""
        self._gateway.pause()
        try:
            await self._sampler.abort()
        except BaseException:
            await self.resume()
            raise

    async def resume(self) -> None:
        """Continue answers with the present weights."""
        self._gateway.resume()

    async def _episode(self, rows: Batch, row: int, sampling: Sampling, record: Schedule | None) -> _Played:
        """Play an episode, or take it from the record of the run that is repeated."""
        if record is None:
            return await self._play(rows, row, sampling)
        group = int(rows.groups[row])
        number = int((rows.groups[:row] == group).sum())
        before = record.kept_rows.next(group, number) if record.kept_rows else None
        played = await self._play(rows, row, sampling) if before is None else _unpacked(before)
        record.keep_row(group, number, before or _packed(played))
        return played

    async def _play(self, rows: Batch, number: int, sampling: Sampling) -> _Played:
        row = dict(cast("dict[str, object]", rows.objects("row")[number])) if "row" in rows else {}
        texts = {name: rows.objects(name)[number] for name in ("prompt", "answer") if name in rows}
        episode = await self._agent.play(self._gateway, row | texts, sampling)
        versions = episode.rows.row("oldest_version")
        return _Played(episode, int(versions.min()) if len(versions) else self._version)


def _with_episodes(rows: Batch, played: Sequence[_Played]) -> Batch:
    episodes = [each.episode for each in played]
    return rows.assign(
        rewards=np.array([each.reward for each in episodes], np.float32),
        reward_error=[each.error for each in episodes],
        oldest_version=np.array([each.oldest_version for each in played], np.int32),
        turns=np.array([each.turns for each in episodes], np.int32),
        tries=np.array([each.tries for each in episodes], np.int32),
        conversation_count=np.array([len(each.rows) for each in episodes], np.int32),
        turn_rewards=Ragged.of([each.turn_rewards for each in episodes], np.float32),
        turn_traces=Ragged.of([each.turn_traces for each in episodes], np.int32),
        trace_rewards=Ragged.of([each.trace_rewards for each in episodes], np.float32),
        turn_seats=Ragged.of([each.turn_seats for each in episodes], np.int32),
        agent_metrics=[dict(each.metrics) for each in episodes],
        versions=Ragged.of([each.rows.versions.values for each in episodes], np.int32),
        completion=[_text(each.rows) for each in episodes],
        truncated=np.array([bool(each.rows.row("truncated").any()) for each in episodes], np.bool_),
        aborted=np.zeros(len(episodes), np.bool_),
        episode=[each.rows for each in episodes],
    )


def _text(rows: Batch) -> str:
    return "\n".join(map(str, rows.objects("completion"))) if len(rows) else ""


def conversations(batch: Batch) -> Batch:
    """The rows of episodes, as `Conversation.rows` returns them, each with the columns of its episode.

    A ragged column with one value per turn, such as `turn_rewards`, becomes one value per token: that of the token's
    turn, and 0 where it is not learnt. Needs the column `episode` of `Agents`. An episode without an answer of the
    model has no rows, nor has one whose reward is unknown. A warning says if no episode has any, or if all failed.
    """
    episodes = cast("tuple[Batch, ...]", batch.objects(_EPISODE) if len(batch) else ())
    unknown = np.isnan(batch.rewards).tolist()
    learned = [each.select([]) if out else each for each, out in zip(episodes, unknown, strict=True)]
    rows = Batch.concat(learned)
    own = batch.drop(_EPISODE, *(name for name in rows.names if name in batch))
    _warn(batch, episodes)
    if not len(rows):
        return own.select(np.zeros(0, np.int64)).assign(**rows.columns)
    own = own.select(np.repeat(np.arange(len(batch)), [len(each) for each in learned]))
    spread = {name: _by_token(column, rows) for name, column in own.columns.items() if isinstance(column, Ragged)}
    return own.assign(**rows.columns, **spread)


def _warn(batch: Batch, episodes: Sequence[Batch]) -> None:
    """Warn if there is nothing to learn, because all episodes failed or none asked the model."""
    errors = batch.objects("reward_error") if len(batch) and "reward_error" in batch else ()
    failed, asked = [error for error in errors if error is not None], sum(len(each) > 0 for each in episodes)
    if len(batch) and (not asked or len(failed) == len(batch)):
        log.warning(
            f"there is nothing to learn from {len(batch)} episodes: {len(failed)} failed, and {asked} asked the model",
            error=failed[0] if failed else None,
        )


def _by_token(column: Ragged, rows: Batch) -> Ragged:
    """Expand one value per turn to one per token."""
    turn = rows.ragged("turn")
    numbers = np.asarray(turn.values, np.int64)
    learnt = numbers >= 0
    values = np.zeros(len(numbers), column.values.dtype)
    values[learnt] = column.values[(np.repeat(column.offsets[:-1], turn.lengths) + numbers)[learnt]]
    return Ragged(values, turn.offsets)
