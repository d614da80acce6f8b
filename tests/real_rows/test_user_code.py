"""A user's code runs on the main thread of a process of its own on every engine, and is ended if it hangs."""

import asyncio
import gc
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest
from structlog.testing import capture_logs

import meshrl as rl
from meshrl.agents import Agent, AgentConfig, Episode, Gateway
from meshrl.data import Batch
from meshrl.errors import ConfigError
from meshrl.tasks.environment import FunctionEnvironment
from meshrl.tasks.function import FunctionReward
from meshrl.testing import ScriptedChat, ScriptedSampler

CODE = """
import asyncio, decimal, enum, multiprocessing, os, signal, sqlite3, sys, threading, time
decimal.getcontext().prec = 50
local, loop, database = threading.local(), asyncio.new_event_loop(), sqlite3.connect(":memory:")
local.known = 1.0
count, first = 0, None

def alarm(p, c, row):
    signal.alarm(60)
    signal.alarm(0)
    return signal.signal(signal.SIGUSR1, signal.SIG_IGN) == signal.SIG_DFL or 1

def runs(p, c, row): return asyncio.run(asyncio.sleep(0, 1.0))
def thread_local(p, c, row): return local.known
def connection(p, c, row): return database.execute("select 1").fetchone()[0]
def context(p, c, row): return decimal.getcontext().prec / 50
def own_loop(p, c, row): return loop.run_until_complete(asyncio.sleep(0, 1.0))
def prints(p, c, row): return print("to standard output") or 1.0

def processes(p, c, row):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(float, ("1",))

def moves(p, c, row):
    os.chdir("/")
    return 1.0

async def same_loop(p, c, row):
    global first
    first = first or asyncio.get_running_loop()
    return first is asyncio.get_running_loop()

class Colour(enum.Enum):
    RED = 1

def unknown_class(p, c, row):
    raise KeyError(Colour.RED)

def exits(p, c, row): return sys.exit(3) if c == "bad" else 1.0
def dies(p, c, row): return os._exit(3) if c == "bad" else 1.0
def hangs(p, c, row): return time.sleep(1000) if c == "bad" else 1.0
async def blocks(p, c, row):
    return time.sleep(1000) if await asyncio.sleep(0) or c == "bad" else await asyncio.sleep(0, 1.0)

async def dies_later(p, c, row):
    global count
    count += 1
    while count < 3 and not os.path.exists(row["flag"]):
        await asyncio.sleep(0)
    if c == "bad":
        open(row["flag"], "w").close()
        await asyncio.to_thread(os._exit, 3)
    while not os.path.exists(row["flag"]):
        await asyncio.sleep(0)
    return 1.0

async def waits(p, c, row): return await asyncio.Event().wait() if c == "bad" else 1.0
"""
THREADED = """
import asyncio, os, threading
background = asyncio.new_event_loop()
threading.Thread(target=background.run_forever, daemon=True).start()

async def asks(p, c, row):
    await asyncio.sleep(0.1)
    if c == "bad":
        os._exit(3)
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0, 1.0), background))
"""
TURNS = """
import asyncio, os, signal, threading, time
local = threading.local()
local.known = 1.0

def scripted():
    signal.alarm(60)
    signal.alarm(0)
    return asyncio.run(asyncio.sleep(0, local.known))

class Game:
    async def reset(self, row):
        return row["prompt"]
    def step(self, completion):
        if completion == "hangs":
            time.sleep(1000)
        if completion == "dies":
            os._exit(3)
        return "", scripted(), False

class Async(Game):
    async def step(self, completion):
        signal.alarm(60)
        signal.alarm(0)
        return "", 1.0, False

count_of_calls = 0

def solve(client, row):
    global count_of_calls
    count_of_calls += 1
    if row["prompt"] == "dies":
        os._exit(3)
    if row["prompt"] == "hangs":
        with open(row["fifo"], "w"):
            time.sleep(1000)
    return scripted() + len(client.models.list().data) + count_of_calls

async def solve_later(client, row):
    return 2.0

def verdict(transcripts, row, result):
    return scripted() + result
"""
ROWS = Batch.of(prompt=["", "", ""], completion=["good", "bad", "good"])


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "user_rewards.py").write_text(CODE, "utf-8")
    (tmp_path / "user_threads.py").write_text(THREADED, "utf-8")
    (tmp_path / "user_turns.py").write_text(TURNS, "utf-8")
    return tmp_path / "user_rewards.py"


async def test_what_works_in_a_script_works_in_a_reward(code: Path) -> None:
    names = ["alarm", "runs", "thread_local", "connection", "context", "own_loop", "prints", "processes"]
    names += ["moves", "same_loop"]
    here = Path.cwd()
    for seconds in (None, 60.0):
        functions = {name: f"{code}:{name}" for name in (names if seconds is None else names[:2])}
        reward = FunctionReward(rl.RewardConfig(functions=functions, row_timeout=seconds))
        for _ in range(2):
            scored = await reward.score(ROWS)
            assert scored.objects("reward_error") == (None,) * 3
            assert scored.rewards.tolist() == [len(functions)] * 3
    assert Path.cwd() == here


def test_an_error_of_a_class_that_only_its_process_knows_costs_its_row_in_each_event_loop(code: Path) -> None:
    reward = FunctionReward(rl.RewardConfig(function=f"{code}:unknown_class"))
    for _ in range(2):
        errors = asyncio.run(reward.score(ROWS)).objects("reward_error")
        assert all("cannot be unpickled here" in str(error) for error in errors)


async def test_code_that_ends_or_hangs_costs_its_row_alone(code: Path) -> None:
    late = "TimeoutError: the reward took longer than reward.row_timeout = 4"
    ended = "ProcessEnded: its process ended with status 3"
    threads = code.with_name("user_threads.py")
    errors = {
        f"{code}:exits": "SystemExit: 3", f"{code}:dies": ended, f"{code}:dies_later": ended, f"{threads}:asks": ended,
        f"{code}:hangs": late, f"{code}:waits": late, f"{code}:blocks": late,
    }  # fmt: skip
    rows = ROWS.assign(row=[{"flag": str(code.with_name("flag"))}] * 3)
    configs = [
        rl.RewardConfig(function=name, row_timeout=4 if error == late else 600, errors="zero")
        for name, error in errors.items()
    ]
    with capture_logs():
        found = await asyncio.gather(*[reward.score(rows) for reward in map(FunctionReward, configs)])
    for scored, (name, error) in zip(found, errors.items(), strict=True):
        told = scored.objects("reward_error")
        assert told[1] == error, name
        innocent = {None, late} if error == late else {None}  # a slow machine may need the whole time for a good row
        assert {told[0], told[2]} <= innocent, name
        assert scored.rewards.tolist() == [float(each is None) for each in told], name


def test_each_call_that_ends_the_process_costs_its_row_in_each_event_loop(code: Path) -> None:
    rows = batch_of("good", "bad", "good", "bad", "good", "good", "bad")
    config = rl.RewardConfig(function=f"{code.with_name('user_threads.py')}:asks", concurrency=4, errors="zero")
    reward = FunctionReward(config)
    for _ in range(2):
        with capture_logs():
            assert asyncio.run(reward.score(rows)).rewards.tolist() == [1, 0, 1, 0, 1, 1, 0]


async def test_a_process_ends_with_the_actor_that_needs_it(code: Path) -> None:
    code.write_text("import os\ndef reward(p, c, row): return os.getpid()", "utf-8")
    reward = FunctionReward(rl.RewardConfig(function=f"{code}:reward"))
    number = int((await reward.score(ROWS)).rewards[0])
    os.kill(number, 0)
    del reward
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.wide
async def test_a_hung_call_that_was_cancelled_holds_up_no_other(code: Path) -> None:
    os.mkfifo(begun := code.with_name("begun"))
    code.write_text(CODE.replace("time.sleep(1000)", f"[open({str(begun)!r}, 'w'), time.sleep(1000)]"), "utf-8")
    reward = FunctionReward(rl.RewardConfig(function=f"{code}:hangs"))
    scoring = asyncio.create_task(reward.score(ROWS.select([1])))
    with await asyncio.to_thread(begun.open):
        scoring.cancel()
    assert (await reward.score(ROWS.select([0]))).rewards.tolist() == [1]


async def test_closures_travel_and_those_that_cannot_run_here(code: Path) -> None:
    import threading  # noqa: PLC0415

    factor, lock = 2.0, threading.Lock()

    def travels(prompt: str, completion: str, row: object) -> float:
        return factor * (threading.current_thread() is threading.main_thread())

    def stays(prompt: str, completion: str, row: object) -> float:
        with lock:
            return factor

    class Stays:
        async def __call__(self, prompt: str, completion: str, row: object) -> float:
            with lock:
                return factor

    with capture_logs() as logs:
        for function, seconds in (travels, None), (stays, None), (Stays(), 60):
            reward = FunctionReward(rl.RewardConfig(function=function, row_timeout=seconds))
            assert (await reward.score(ROWS)).rewards.tolist() == [2.0] * 3
    assert ["cannot be pickled" in line["event"] for line in logs] == [True] * 2
    with pytest.raises(ConfigError, match="row_timeout cannot end"):
        FunctionReward(rl.RewardConfig(function=stays, row_timeout=60))


def batch_of(*completions: str) -> Batch:
    numbers = np.arange(len(completions))
    return Batch.of(prompt=["a"] * len(completions), completion=list(completions), episode=numbers)


async def played(code: Path, name: str, *turns: str, **table: float) -> tuple[list[float], tuple[object, ...]]:
    source = name.format(code=code, turns=code.with_name("user_turns.py"))
    config = rl.EnvironmentConfig.model_validate({"source": source, **table})
    environment = FunctionEnvironment(config)
    with capture_logs():
        begun = await environment.reset(batch_of(*turns))
        answer = await environment.step(begun.select([0]))
        rest = await environment.step(begun.select(range(1, len(turns)))) if len(turns) > 1 else answer.select([])
        again = await environment.step((await environment.reset(batch_of("right"))).select([0]))
    errors = (*answer.objects("reward_error"), *rest.objects("reward_error"))
    return [*answer.rewards, *rest.rewards, *again.rewards], errors


async def test_what_works_in_a_script_works_in_an_environment(code: Path) -> None:
    for name in ("{turns}:Game", "{turns}:Async", "reward:{code}:runs", "reward:{code}:same_loop"):
        rewards, errors = await played(code, name, "right")
        assert (rewards, errors) == ([1, 1], (None,)), name


@pytest.mark.parametrize(
    ("turn", "seconds", "error"),
    [
        ("dies", 600, "ProcessEnded: its process ended with status 3"),
        ("hangs", 2, "TimeoutError: the environment took longer than environment.turn_timeout = 2"),
    ],
)
async def test_an_environment_that_ends_or_hangs_is_ended_and_others_say_so(
    code: Path, turn: str, seconds: float, error: str
) -> None:
    rewards, errors = await played(code, "{turns}:Game", turn, "right", turn_timeout=seconds)
    lost = "RuntimeError: the environment is lost, because another episode ended their process"
    assert (rewards, errors) == ([0, 0, 1], (error, lost))


async def test_plain_agents_and_judges_each_have_a_process(code: Path, tmp_path: Path) -> None:
    code = code.with_name("user_turns.py")
    async with Gateway(ScriptedSampler([]), ScriptedChat()).serving() as gateway:
        with capture_logs():

            async def play(row: dict[str, str], source: str = "solve", **table: object) -> Episode:
                agent = Agent(AgentConfig.model_validate({"source": f"{code}:{source}", **table}))
                return await agent.play(gateway, row, rl.Sampling())

            agent = Agent(AgentConfig(source=f"{code}:solve", reward=f"{code}:verdict"))
            both = await asyncio.gather(*(agent.play(gateway, {"prompt": ""}, rl.Sampling()) for _ in range(2)))
            assert [(each.reward, each.error) for each in both] == [(4.0, None)] * 2
            died = await agent.play(gateway, {"prompt": "dies"}, rl.Sampling())
            assert died.error == "RuntimeError: its process ended with status 3"
            judged = await play({"prompt": ""}, "solve_later", reward=f"{code}:verdict")
            assert (judged.reward, judged.error) == (3.0, None)
            os.mkfifo(fifo := tmp_path / "fifo")
            held = asyncio.create_task(asyncio.to_thread(fifo.read_text))
            late = await play({"prompt": "hangs", "fifo": str(fifo)}, timeout=2.0)
            assert "no result in 2 seconds" in str(late.error)
            assert await held == "", "whoever held it has ended"


async def test_functions_of_a_module_that_cannot_be_imported(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("nowhere")  # as pytest's import mode "importlib" makes them
    package.__path__ = [str(code.parent)]
    spec = importlib.util.spec_from_file_location("nowhere.helpers", code.with_name("helpers.py"))
    assert spec is not None
    assert spec.loader is not None
    helpers = "def one():\n    return 1.0\n\ndef reward(p, c, row):\n    return one()\n"
    code.with_name("helpers.py").write_text(helpers, "utf-8")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "nowhere", package)
    monkeypatch.setitem(sys.modules, "nowhere.helpers", module)
    spec.loader.exec_module(module)

    def calls(prompt: str, completion: str, row: object) -> float:
        return cast("float", module.one())

    for function in (module.reward, calls, rl.from_trl(lambda completions: [module.one()])):
        scored = await FunctionReward(rl.RewardConfig(function=function)).score(ROWS)
        assert scored.rewards.tolist() == [1] * 3
