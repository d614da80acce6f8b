"""An agent: a user's program that talks to the model, played for one row of a task, and its outcome.

    # my_agent.py
    async def solve(client, row):        # an openai.AsyncOpenAI, and the task's row
        messages = [{"role": "user", "content": row["prompt"]}]
        told = await client.chat.completions.create(model="policy", messages=messages)
        return float(told.choices[0].message.content == row["answer"])

    agent = Agent(AgentConfig(source="my_agent.py:solve"))
    episode = await agent.play(gateway, row, sampling)

What it raises, or where it hangs, is told of its episode alone. What the sampler raises is not the program's
fault: it is raised.
"""

import asyncio
import contextvars
import copy
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import coroutine
from typing import Final, cast

import httpx2
import msgspec
import numpy as np
import openai
from numpy.typing import NDArray

from meshrl.agents.answers import MODEL
from meshrl.agents.command import Output, result_of, run
from meshrl.agents.config import AgentConfig, is_async, load_agent, load_reward
from meshrl.agents.container import Container
from meshrl.agents.gateway import Gateway, Session
from meshrl.data import Batch
from meshrl.errors import ConfigError
from meshrl.rewards import finite
from meshrl.roles import Sampling
from meshrl.tasks import Row
from meshrl.user_code import RAISED, FirstErrors, unless_cancelled

_RETRIES: Final = 8
"""Of a request that the gateway has no room for, by the client that a function is given."""
_ENDS: Final = 5.0
"""Seconds in which an async function ends that is cancelled, before it is left where it waits."""


@dataclass(frozen=True)
class Episode:
    """What came of an agent's work on one row."""

    rows: Batch
    """What it said to the model: as `Conversation.rows`, with `rewards`, the episode's on each, and `reward_error`."""
    reward: float
    """0 where it failed."""
    error: str | None
    """What it raised, or that it took too long."""
    turns: int
    """Answers of the model."""
    tries: int
    """How often it was played."""
    output: str
    """The last that a command wrote; nothing of a function, which prints where the script does."""
    turn_rewards: NDArray[np.float32]
    """Of each answer, in their order: what the program gave, or else `reward` at the last, float32[turns]."""


class Agent:
    """Plays episodes, as many at once as are configured."""

    def __init__(self, config: AgentConfig, outputs: Path | None = None) -> None:
        """`outputs`: a folder, such as `run.folder / "agents"`, where what commands write is kept, a file an episode.

        ConfigError where a function or the program is not found.
        """
        self._config = config
        self._outputs = outputs
        self._numbers = count(_newest(outputs) + 1)
        self._room = asyncio.Semaphore(config.concurrency)
        self._function = load_agent(config)
        self._reward = load_reward(config)
        self._errors = FirstErrors("an agent failed; its episode has reward 0")

    @property
    def needs_server(self) -> bool:
        """Whether it talks to a server: a plain function and a command do."""
        return self._function is None or not is_async(self._function)

    async def play(self, gateway: Gateway, row: Mapping[str, object], sampling: Sampling) -> Episode:
        """Let it work on the row, in a session of its own. A plain function and a command need `gateway.serving`.

        A plain function that takes too long goes on in its thread, which nobody waits for: its session is over. An
        async one is cancelled, and goes on no more where it has not ended 5 seconds later. Where the sampler failed and
        the episode did too, what the sampler raised is raised. ConfigError without a server.
        """
        if self.needs_server and not gateway.is_serving:
            raise ConfigError(
                "a plain function and a command talk to a server: play inside `async with gateway.serving()`"
            )
        async with self._room:
            tries = 0
            while True:
                tries += 1
                episode = await self._play(gateway, row, sampling, tries)
                if episode.error is None or tries > self._config.retries:
                    return episode

    async def _play(self, gateway: Gateway, row: Mapping[str, object], sampling: Sampling, tries: int) -> Episode:
        session, output = gateway.open(sampling), self._output()
        reward, error, turns = 0.0, None, None
        try:
            result = await self._result(gateway, session, row, output)
            reward, turns = reward_of(result), turn_rewards_of(result, len(session.conversation))
        except RAISED as raised:  # somebody's program may raise anything; it is data
            unless_cancelled(raised)
            if session.failure is not None:
                raise session.failure from raised
            error = self._errors.told(raised)
        finally:
            rows = gateway.close(session)
        told = rows.assign(rewards=np.full(len(rows), reward, np.float32), reward_error=[error] * len(rows))
        answers = len(session.conversation)
        return Episode(told, reward, error, answers, tries, output.text, _by_turn(reward, turns, answers))

    def _output(self) -> Output:
        """Where the output of the next command goes; that of an old one makes room."""
        most = self._config.output_mib << 20
        if self._outputs is None or self._function is not None:
            return Output(most)
        number = next(self._numbers)
        _file(self._outputs, number - self._config.outputs_kept).unlink(missing_ok=True)
        return Output(most, _file(self._outputs, number))

    async def _result(self, gateway: Gateway, session: Session, row: Mapping[str, object], output: Output) -> object:
        """What it returns or raises, or TimeoutError. It has a task of its own, which is over however this ends."""
        work = _Work()
        playing = asyncio.create_task(_outcome(self._judged(gateway, session, row, output, work)))
        try:
            if not (await asyncio.wait([playing], timeout=self._config.timeout))[0]:
                raise TimeoutError(f"no result in {self._config.timeout:g} seconds (timeout)")
        finally:
            if not playing.done():
                gateway.close(session)  # what it still asks for is no part of the episode
                await work.end(playing)
        result, error = playing.result()
        if error is not None:
            raise error
        return result

    async def _judged(
        self, gateway: Gateway, session: Session, row: Mapping[str, object], output: Output, work: "_Work"
    ) -> object:
        """What it returns, or what the function returns that judges that."""
        result = await self._call(gateway, session, copy.deepcopy(dict(row)), output, work)
        if self._reward is None:
            return result
        given = (session.conversation.transcripts(), copy.deepcopy(dict(row)), result)
        if is_async(self._reward):
            return await work.of(_awaited(self._reward, *given))
        return await _in_thread(partial(self._reward, *given))

    async def _call(self, gateway: Gateway, session: Session, own: Row, output: Output, work: "_Work") -> object:
        if self._function is not None and is_async(self._function):
            # Past the network: the same in a test in virtual time.
            inside = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
            async with openai.AsyncOpenAI(
                base_url=session.url, api_key=session.token, max_retries=_RETRIES, http_client=inside
            ) as client:
                return await work.of(_awaited(self._function, client, own))
        if self._function is not None:
            return await _in_thread(partial(_plain, self._function, session, own))
        environment = {
            "OPENAI_BASE_URL": session.url,
            "OPENAI_API_KEY": session.token,
            "OPENAI_MODEL": MODEL,
            **_no_proxy(httpx2.URL(session.url).host),
        }
        given = msgspec.json.encode(own, enc_hook=str)
        config = self._config
        container = Container(config.runtime, config.image, f"meshrl-{session.id}") if config.image else None
        await run(config.command, given, environment, output, container)
        return result_of(output.said) if self._reward is None else output.said


class _Work:
    """Somebody's coroutine, which may go on when it is cancelled: then it is left where it waits."""

    def __init__(self) -> None:
        self._has_begun = False
        self._is_left = False

    @coroutine
    def of(self, working: Coroutine[object, object, object]) -> Generator[object, object, object]:
        """What it returns or raises, as `await` has it, until it is left: then it is told nothing more."""
        self._has_begun = True
        step: Callable[[], object] = partial(working.send, None)
        while True:
            try:
                waits_for = step()
            except StopIteration as ended:
                return cast("object", ended.value)
            try:
                step = partial(working.send, (yield waits_for))
            except BaseException as raised:  # it is the coroutine's to bear
                if self._is_left:
                    with suppress(Exception):  # its last words; and not later, where no loop runs to hold it up
                        working.close()
                    raise
                step = partial(working.throw, raised)

    async def end(self, task: asyncio.Task[object]) -> None:
        """End the task that plays it."""
        task.cancel()
        if self._has_begun:
            try:
                await asyncio.wait([task], timeout=_ENDS)
            finally:
                self._is_left = True
                task.cancel()
        await asyncio.wait([task])


async def _awaited(function: Callable[..., object], *given: object) -> object:
    result = function(*given)
    return await cast("Awaitable[object]", result) if inspect.isawaitable(result) else result


async def _outcome(call: Coroutine[object, object, object]) -> tuple[object, BaseException | None]:
    """What it returns or raises, told and not raised: SystemExit would end the loop."""
    try:
        return await call, None
    except (Exception, SystemExit) as raised:  # noqa: BLE001 -- raised again where it is waited for
        return None, raised


def _file(outputs: Path, number: int) -> Path:
    return outputs / f"{number:08d}.txt"


def _newest(outputs: Path | None) -> int:
    """The number of the last output that is there, of a run that goes on; 0 where there is none."""
    files = outputs.glob("[0-9]" * 8 + ".txt") if outputs is not None else ()
    return max((int(file.stem) for file in files), default=0)


def reward_of(result: object) -> float:
    """The reward that an agent's result says: a number, or what has one as `reward`. TypeError for others."""
    if isinstance(result, Mapping) and "reward" in result:
        return finite(cast("Mapping[str, object]", result)["reward"])
    if isinstance(result, bool | int | float | np.number):
        return finite(result)
    raise TypeError(f'an agent returns its reward, a number or {{"reward": number}}, and not {result!r:.80}')


def turn_rewards_of(result: object, answers: int) -> Sequence[float] | None:
    """The rewards of turns that an agent's result says: a list, `turns`, with one for each answer; None without it.

    ValueError where it has another number of them.
    """
    given = cast("Mapping[str, object]", result).get("turns") if isinstance(result, Mapping) else None
    if given is None:
        return None
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != answers:
        raise ValueError(
            f"`turns` of the result is {given!r:.80}, and the model answered {answers} times: give a list of rewards, "
            "one for each answer, in their order"
        )
    return [finite(reward) for reward in cast("Sequence[object]", given)]


def _by_turn(reward: float, turns: Sequence[float] | None, answers: int) -> NDArray[np.float32]:
    """The rewards of so many turns; where none were given, the episode's falls on the last."""
    given = [*[0.0] * (answers - 1), reward] if turns is None else turns
    rewards = np.zeros(answers, np.float32)
    rewards[: len(given)] = given[:answers]  # what is answered after the result is worth 0
    return rewards


def _no_proxy(host: str) -> Mapping[str, str]:
    """What programs read to reach it without a proxy, with what ours says already."""
    said = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    return dict.fromkeys(("NO_PROXY", "no_proxy"), f"{said},{host}" if said else host)


def _plain(function: Callable[..., object], session: Session, row: Row) -> object:
    straight = httpx2.Client(trust_env=False)  # the gateway is no proxy's to reach
    with openai.OpenAI(
        base_url=session.url, api_key=session.token, max_retries=_RETRIES, http_client=straight
    ) as client:
        return function(client, row)


async def _in_thread(call: Callable[[], object]) -> object:
    """What it returns or raises, in a thread of its own: one that hangs holds up no other, nor the process's end."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

    def tell(result: object, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((result, error))

    def run_it() -> None:
        result: object = None
        error: BaseException | None = None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 -- raised again below
            error = raised
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=contextvars.copy_context().run, args=(run_it,), name="agent", daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result
