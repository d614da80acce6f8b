"""An agent: a program of somebody's that talks to the model, played for a task's row, and what came of it.

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
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, cast

import httpx2
import msgspec
import numpy as np
import openai
from numpy.typing import NDArray

from meshrl.agents.answers import MODEL
from meshrl.agents.command import Output, run
from meshrl.agents.config import AgentConfig, load_agent
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

        ConfigError where the function or the program is not found.
        """
        self._config = config
        self._outputs = outputs
        self._numbers = count(_newest(outputs) + 1)
        self._room = asyncio.Semaphore(config.concurrency)
        self._function = load_agent(config)
        self._errors = FirstErrors("an agent failed; its episode has reward 0")

    @property
    def needs_server(self) -> bool:
        """Whether it talks to a server: a plain function and a command do."""
        return not inspect.iscoroutinefunction(self._function)

    async def play(self, gateway: Gateway, row: Mapping[str, object], sampling: Sampling) -> Episode:
        """Let it work on the row, in a session of its own. A plain function and a command need `gateway.serving`.

        A plain function that takes too long goes on in its thread, which nobody waits for: its session is over. Where
        the sampler failed and the episode did too, what the sampler raised is raised. ConfigError without a server.
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
        limit = asyncio.timeout(self._config.seconds)
        try:
            async with limit:
                result = await self._call(gateway, session, row, output)
                reward, turns = reward_of(result), turn_rewards_of(result, len(session.conversation))
        except RAISED as raised:  # somebody's program may raise anything; it is data
            unless_cancelled(raised)
            if session.failure is not None:
                raise session.failure from raised
            late = isinstance(raised, TimeoutError) and limit.expired()
            error = self._errors.told(
                TimeoutError(f"no result in {self._config.seconds:g} seconds (seconds)") if late else raised
            )
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

    async def _call(self, gateway: Gateway, session: Session, row: Mapping[str, object], output: Output) -> object:
        own = copy.deepcopy(dict(row))
        if self._function is not None and inspect.iscoroutinefunction(self._function):
            # Past the network: the same in a test in virtual time.
            inside = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
            async with openai.AsyncOpenAI(
                base_url=session.url, api_key=session.token, max_retries=_RETRIES, http_client=inside
            ) as client:
                return cast("object", await self._function(client, own))
        if self._function is not None:
            return await _in_thread(partial(_plain, self._function, session, own))
        environment = {"OPENAI_BASE_URL": session.url, "OPENAI_API_KEY": session.token, "OPENAI_MODEL": MODEL}
        given = msgspec.json.encode(own, enc_hook=str)
        config = self._config
        container = Container(config.runtime, config.image, f"meshrl-{session.id}") if config.image else None
        return await run(config.command, given, environment, output, container)


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


def _plain(function: Callable[..., object], session: Session, row: Row) -> object:
    with openai.OpenAI(base_url=session.url, api_key=session.token, max_retries=_RETRIES) as client:
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
