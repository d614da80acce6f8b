"""An agent: a user's program that talks to the model, played for one row of a task, and its outcome.

A program that raises or hangs fails its own episode only. An error of the sampler and a fault of the machine are not
the program's: `play` raises the first, and plays the episode again after the second.
"""

import asyncio
import copy
import math
import os
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import coroutine
from typing import Final, cast

import httpx2
import msgspec
import numpy as np
import openai
from numpy.typing import NDArray

from meshrl.agents.command import Container, Output, result_of, run
from meshrl.agents.config import AgentConfig, load_agent, load_reward
from meshrl.agents.gateway import Gateway, Session
from meshrl.agents.protocol import MODEL
from meshrl.data import OUTCOMES, Batch, Ragged, with_rewards
from meshrl.errors import ConfigError, DataError, causes_of, described, is_of_machine, is_unknown, shortened
from meshrl.roles import Sampling
from meshrl.tasks import (
    Row,
    Sandbox,
    UserCode,
    awaited,
    check_sandbox,
    finite,
    has_processes,
    open_sandbox,
    takes_sandbox,
)
from meshrl.user_code import RAISED, FirstErrors, is_async, load_name, tried_again, unless_cancelled

_RETRIES: Final = 8
"""Number of times that the client of a function repeats a request for which the gateway has no room."""
_ENDS: Final = 5.0
"""Seconds that a cancelled async function gets to end before it is abandoned."""


@dataclass(frozen=True)
class Episode:
    """The outcome of an agent's work on one row."""

    rows: Batch
    """What the agent asked and got, as `Conversation.rows`. Each row has the episode's `rewards` and `reward_error`."""
    reward: float
    """Reward of the episode. NaN, which is unknown, if it was discarded or failed, or 0 with `errors = "zero"`."""
    error: str | None
    """The exception, or a message that the time limit was exceeded. None if the episode succeeded."""
    turns: int
    """Number of the model's answers."""
    tries: int
    """Number of times that the episode was played."""
    output: str
    """The end of a command's output. Empty for a function, which prints to the script's output."""
    turn_rewards: NDArray[np.float32]
    """Reward of each answer in order, float32[turns]: the program's values, or else `reward` on the last answer. If the
    episode failed, `reward` on each."""
    turn_traces: NDArray[np.int32]
    """The trace of each answer, int32[turns]: a number from 0 on. 0 for all, unless the program names traces."""
    trace_rewards: NDArray[np.float32]
    """Reward of each answer's trace, float32[turns]. NaN for a trace that is not learned."""
    turn_seats: NDArray[np.int32]
    """The seat of each answer's trace, int32[turns], such as the side of a game. 0, unless the program says."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Other numbers that the program returned."""


class Agent:
    """Plays episodes, at most `concurrency` at once."""

    def __init__(self, config: AgentConfig, outputs: Path | None = None) -> None:
        """Keep the output of commands in the folder `outputs`, such as `run.folder / "agents"`, one file per episode.

        Raises ConfigError if the function or the program is not found.
        """
        self._config = config
        self._outputs = outputs
        self._numbers = count(_newest(outputs) + 1)
        self._room = asyncio.Semaphore(config.concurrency)
        self._function = load_agent(config)
        self._reward = load_reward(config)
        functions = [each for each in (self._function, self._reward) if each is not None]
        check_sandbox("agent.sandbox", config.sandbox, functions)
        names = (_if_plain(self._function, config.source), _if_plain(self._reward, config.reward))
        self._apart = cache(partial(UserCode, partial(Plain, *names)))
        self._is_apart = any(names)
        self._errors = FirstErrors(f"an agent failed; its episode gets {OUTCOMES[config.errors]}")

    @property
    def needs_server(self) -> bool:
        """True except in virtual time: programs, and frameworks in async functions, reach the model by a URL."""
        return self._function is None or not is_async(self._function) or has_processes()

    async def play(self, gateway: Gateway, row: Mapping[str, object], sampling: Sampling) -> Episode:
        """Let the program work on the row in a new session. A program that uses the URL needs `gateway.serving`.

        A plain function that exceeds the time limit is ended with its process. An async function is cancelled, and
        abandoned if it has not ended 5 seconds later. If both the sampler and the episode failed, the sampler's
        exception is raised. Raises ConfigError if the program needs a server, or an async function asks its client's
        URL and nobody serves it, DataError for an episode that failed with `errors = "stop"`, and MachineFault if the
        machine had no room for it, however often it was played.
        """
        if not gateway.is_serving and (self._function is None or not is_async(self._function)):
            raise ConfigError(
                "a plain function and a command talk to a server: play inside `async with gateway.serving()`"
            )
        if self._is_apart and has_processes():
            self._apart()  # its start does not count as time of an episode
        tries = 0

        async def once() -> tuple[Episode, bool]:
            nonlocal tries
            tries += 1
            return await self._play(gateway, row, sampling, tries)

        async with self._room:
            episode, failed = await tried_again(once)
            for _ in range(self._config.retries):
                if failed:
                    episode, failed = await tried_again(once)
        if failed and self._config.errors == "stop":
            raise DataError(
                f'an episode failed, and agent.errors = "stop": {episode.error}; its row is {shortened(row)}'
            )
        return episode

    async def _play(
        self, gateway: Gateway, row: Mapping[str, object], sampling: Sampling, tries: int
    ) -> tuple[Episode, bool]:
        """Return the episode, and whether it failed. Raises a fault of the machine."""
        session, output = gateway.open(sampling), self._output()
        reward, error, turns, failed = math.nan, None, None, False
        traces, seats, metrics = dict[str, float](), dict[str, float](), dict[str, float]()
        try:
            async with AsyncExitStack() as stack:
                name = self._config.sandbox
                sandbox = await stack.enter_async_context(open_sandbox(name)) if name else None
                result = await self._result(gateway, session, row, output, sandbox)
            reward, turns = _reward_of(result), _turn_rewards_of(result, len(session.conversation))
            traces, seats = _numbers_of(result, "traces", math.nan), _numbers_of(result, "seats")
            metrics = _numbers_of(result, "metrics", infinite=False)
        except RAISED as raised:  # a user's program may raise anything: the exception is data
            unless_cancelled(raised)
            if session.failure is not None:
                raise session.failure from raised
            if is_of_machine(raised):
                raise
            if not gateway.is_serving and _failed_to_connect(httpx2.URL(session.url).host, raised):
                raise ConfigError(
                    f"an async function could not connect: {described(raised)}. Its client needs no server, but what "
                    "takes the client's URL does: play inside `async with gateway.serving()`"
                ) from raised
            error, failed = self._errors.describe(raised), not is_unknown(raised)
            reward = 0.0 if failed and self._config.errors == "zero" else math.nan
        finally:
            rows = gateway.close(session)
        rows = with_rewards(rows, np.full(len(rows), reward), [error] * len(rows), "zero")
        answers = len(session.conversation)
        by_turn = np.full(answers, reward, np.float32) if error else _by_turn(reward, turns, answers)
        askers = session.askers if traces else [""] * answers
        of_trace = np.array([traces.get(each, math.nan) if traces else reward for each in askers], np.float32)
        numbers = np.array([[*dict.fromkeys(askers)].index(each) for each in askers], np.int32)
        of_seat = np.array([seats.get(each, 0) for each in askers], np.int32)
        rows = _without(rows, np.flatnonzero(np.isnan(of_trace)))
        by_trace = (numbers, of_trace, of_seat)
        return Episode(rows, reward, error, answers, tries, output.text, by_turn, *by_trace, metrics), failed

    def _output(self) -> Output:
        """Choose the file for the next command's output, and delete the oldest one."""
        config, folder = self._config, self._outputs
        if folder is None or self._function is not None:
            return Output(config.output_mib << 20)
        number = next(self._numbers)
        (folder / f"{number - config.outputs_kept:08d}.txt").unlink(missing_ok=True)
        return Output(config.output_mib << 20, folder / f"{number:08d}.txt")

    async def _result(
        self,
        gateway: Gateway,
        session: Session,
        row: Mapping[str, object],
        output: Output,
        sandbox: Sandbox | None,
    ) -> object:
        """Return the program's result. Raises its exception or TimeoutError. The program's task always ends here."""
        work = _Work(sandbox)
        playing = asyncio.create_task(_outcome(self._judged(gateway, session, row, output, work)))
        try:
            if not (await asyncio.wait([playing], timeout=self._config.timeout))[0]:
                raise TimeoutError(f"no result in {self._config.timeout:g} seconds (timeout)")
        finally:
            if not playing.done():
                gateway.close(session)  # later requests are not part of the episode
                await work.end(playing)
        result, error = playing.result()
        if error is not None:
            raise error
        return result

    async def _judged(
        self, gateway: Gateway, session: Session, row: Mapping[str, object], output: Output, work: "_Work"
    ) -> object:
        """Return what the program returns, or what the reward function returns for it."""
        result = await self._call(gateway, session, copy.deepcopy(dict(row)), output, work)
        if self._reward is None:
            return result
        arguments = (session.conversation.transcripts(), copy.deepcopy(dict(row)), result)
        if is_async(self._reward) or not has_processes():
            return await work.of(awaited(self._reward(*arguments, **work.given(self._reward))))
        return await self._apart().call("judge", *arguments, check=_same, alone=True)

    async def _call(self, gateway: Gateway, session: Session, own: Row, output: Output, work: "_Work") -> object:
        if self._function is not None and is_async(self._function):
            # Bypass the network, which also makes tests in virtual time possible. Frameworks take the URL.
            inside = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=gateway.app))
            async with openai.AsyncOpenAI(
                base_url=session.url, api_key=session.token, max_retries=_RETRIES, http_client=inside
            ) as client:
                return await work.of(awaited(self._function(client, own, **work.given(self._function))))
        if self._function is not None:
            arguments = (session.url, session.token, own)
            return await self._apart().call("solve", *arguments, check=_same, alone=True)
        # A program reaches the gateway without a proxy. Earlier exceptions stay.
        hosts = filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), httpx2.URL(session.url).host))
        environment = {
            "OPENAI_BASE_URL": session.url,
            "OPENAI_API_KEY": session.token,
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": session.root,
            "ANTHROPIC_API_KEY": session.token,
            "ANTHROPIC_MODEL": MODEL,
            **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts)),
        }
        config = self._config
        container = Container(config.runtime, config.image, f"meshrl-{session.id}") if config.image else None
        await run(config.command, msgspec.json.encode(own, enc_hook=str), environment, output, container)
        return result_of(output.stdout) if self._reward is None else output.stdout


class Plain:
    """The plain functions of an agent, in their process."""

    def __init__(self, solve: str, judge: str) -> None:
        """`solve` and `judge`: their names, "" for none."""
        self._solve, self._judge = (load_name("agent", name, (), callable) if name else None for name in (solve, judge))

    def solve(self, url: str, token: str, row: Row) -> object:
        """Call the agent's function with a client."""
        straight = httpx2.Client(trust_env=False)  # never reach the gateway through a proxy
        with openai.OpenAI(base_url=url, api_key=token, max_retries=_RETRIES, http_client=straight) as client:
            return cast("Callable[..., object]", self._solve)(client, row)

    def judge(self, transcripts: object, row: Row, result: object) -> object:
        """Call the function that judges."""
        return cast("Callable[..., object]", self._judge)(transcripts, row, result)


def _if_plain(function: Callable[..., object] | None, name: str) -> str:
    return name if function is not None and not is_async(function) else ""


def _same(result: object) -> object:
    return result


class _Work:
    """A user's coroutine. If it survives its cancellation, it is abandoned."""

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._has_begun = False
        self._is_left = False
        self._sandbox = sandbox

    def given(self, function: Callable[..., object]) -> Mapping[str, object]:
        """The argument of a function that takes a sandbox."""
        return {"sandbox": self._sandbox} if takes_sandbox(function) else {}

    @coroutine
    def of(self, working: Coroutine[object, object, object]) -> Generator[object, object, object]:
        """Yield what the coroutine yields and return or raise its outcome, as `await` does, until it is abandoned."""
        self._has_begun = True
        step: Callable[[], object] = partial(working.send, None)
        while True:
            try:
                waits_for = step()
            except StopIteration as ended:
                return cast("object", ended.value)
            try:
                step = partial(working.send, (yield waits_for))
            except BaseException as raised:  # the coroutine handles it
                if self._is_left:
                    with suppress(Exception):  # let it clean up now: later there may be no event loop for it
                        working.close()
                    raise
                step = partial(working.throw, raised)

    async def end(self, task: asyncio.Task[object]) -> None:
        """Cancel the task that plays the coroutine, and abandon it if it does not end."""
        task.cancel()
        if self._has_begun:
            try:
                await asyncio.wait([task], timeout=_ENDS)
            finally:
                self._is_left = True
                task.cancel()
        await asyncio.wait([task])


async def _outcome(call: Coroutine[object, object, object]) -> tuple[object, BaseException | None]:
    """Return the result and the exception. Nothing is raised: SystemExit would end the loop."""
    try:
        return await call, None
    except (Exception, SystemExit) as raised:  # noqa: BLE001 -- raised again where it is awaited
        return None, raised


def _failed_to_connect(host: str, error: BaseException) -> bool:
    """True if an exception came of a connection to this host that could not be made."""
    for each in causes_of(error):
        if "Connect" in type(each).__name__:
            told = described(each)
            with suppress(Exception):  # not all have a request
                told += f" {cast('openai.APIConnectionError', each).request.url}"
            if host in told:
                return True
    return False


def _newest(outputs: Path | None) -> int:
    """The number of the last output file of a resumed run, 0 without one."""
    files = outputs.glob("[0-9]" * 8 + ".txt") if outputs is not None else ()
    return max((int(file.stem) for file in files), default=0)


def _reward_of(result: object) -> float:
    if isinstance(result, Mapping) and "reward" in result:
        return finite(cast("Mapping[str, object]", result)["reward"])
    if isinstance(result, bool | int | float | np.number):
        return finite(result)
    raise TypeError(f'an agent returns its reward, a number or {{"reward": number}}, and not {result!r:.80}')


def _turn_rewards_of(result: object, answers: int) -> Sequence[float] | None:
    turns = cast("Mapping[str, object]", result).get("turns") if isinstance(result, Mapping) else None
    if turns is None:
        return None
    if not isinstance(turns, Sequence) or isinstance(turns, str) or len(turns) != answers:
        raise ValueError(
            f"`turns` of the result is {turns!r:.80}, and the model answered {answers} times: give a list of rewards, "
            "one for each answer, in their order"
        )
    return [finite(reward) for reward in cast("Sequence[object]", turns)]


def _numbers_of(result: object, name: str, null: float | None = None, *, infinite: bool = True) -> dict[str, float]:
    """Read a table of numbers of the result, empty without it.

    `null`: what a null means, if it is allowed. Without `infinite`, numbers that are not finite are left out, and
    otherwise they are an error.
    """
    table = cast("Mapping[str, object]", result).get(name) if isinstance(result, Mapping) else None
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise TypeError(f"`{name}` of the result is {table!r:.80}: give a table of numbers")
    given = cast("Mapping[object, object]", table)
    numbers = dict[str, float]()
    for key, value in given.items():
        if isinstance(value, float | np.floating) and not infinite and not math.isfinite(value):
            continue
        try:
            numbers[str(key)] = null if value is None and null is not None else finite(value, name.removesuffix("s"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{name}` of the result, {str(key)!r}: {error}") from error
    return numbers


def _without(rows: Batch, answers: NDArray[np.int64]) -> Batch:
    """Learn nothing from these answers."""
    if not len(answers) or not len(rows):
        return rows
    mask, turn = rows.loss_mask, rows.ragged("turn")
    return rows.assign(
        loss_mask=Ragged(np.asarray(mask.values, np.bool_) & ~np.isin(turn.values, answers), mask.offsets)
    )


def _by_turn(reward: float, turns: Sequence[float] | None, answers: int) -> NDArray[np.float32]:
    """One reward per answer. Without `turns`, the last answer gets the episode's reward."""
    values = [*[0.0] * (answers - 1), reward] if turns is None else turns
    rewards = np.zeros(answers, np.float32)
    rewards[: len(values)] = values[:answers]  # answers after the result get 0
    return rewards
