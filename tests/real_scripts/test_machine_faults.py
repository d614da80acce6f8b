"""A machine that lacks space, files, processes or a container is never a reward, nor is what a program discards."""

import asyncio
import errno
import math
import os
import resource
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshrl as rl
from meshrl.agents import Agent, AgentConfig, Episode, Gateway
from meshrl.errors import MachineFault
from meshrl.tasks.environment import FunctionEnvironment
from meshrl.tasks.function import FunctionReward, boundary
from meshrl.testing import FakeSampler, ScriptedChat, ScriptedSampler, simulate
from tests.agents.talks import ROW, served

FAULTS = {
    "space": "raise OSError(errno.ENOSPC, 'No space left on device')",
    "quota-wrapped": "try: raise OSError(errno.EDQUOT, 'over quota')\nexcept OSError: raise ValueError('no tool')",
    "files-in-a-group": "raise ExceptionGroup('tools', [OSError(errno.EMFILE, 'Too many open files')])",
    "threads": 'raise RuntimeError("can\'t start new thread")',
    "temporary-folder": "raise FileNotFoundError(errno.ENOENT, \"No usable temporary directory found in ['/tmp']\")",
}
HEAD = "import asyncio, errno, sys\nimport meshrl as rl\ntries = 0\n"


@pytest.fixture
def code(tmp_path: Path) -> Callable[..., str]:
    """`code(body, head)`: the name of a function with this body, in a file that counts its calls."""

    def made(body: str, head: str = "async def f(client, row)", name: str = "mine") -> str:
        file, whole = tmp_path / f"{name}.py", f"global tries\ntries += 1\n{body}"
        file.write_text(f"{HEAD}\n{head}:\n{textwrap.indent(whole, '    ')}\n", "utf-8")
        return f"{file}:f"

    return made


def played(source: str, **config: Any) -> Episode:
    async def main() -> Episode:
        agent = Agent(AgentConfig(source=source, **config))
        return await agent.play(Gateway(ScriptedSampler([]), ScriptedChat()), ROW, rl.Sampling())

    return simulate(main)


def first(fault: str, times: int = 3) -> str:
    return f"if tries <= {times}:\n{textwrap.indent(fault, '    ')}\nreturn 1.0"


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_episode_that_met_a_fault_of_the_machine_is_played_again(code: Callable[..., str], fault: str) -> None:
    episode = played(code(first(fault)), errors="zero")
    assert (episode.reward, episode.error, episode.tries) == (1.0, None, 4)


@pytest.mark.parametrize("errors", ["mask", "zero", "stop"])
def test_a_fault_that_stays_is_raised_and_says_what_to_give(code: Callable[..., str], errors: str) -> None:
    with pytest.raises(MachineFault, match=r"no room 9 times.*No space left.*mine.py, line \d+.*TMPDIR.*ulimit"):
        played(code(FAULTS["space"]), errors=errors)


NO_FAULTS = {
    "RuntimeError('cannot parse the answer: no space left on device')": math.nan,
    "BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')": 0.0,
    "ValueError('No space left on device')": 0.0,
}


@pytest.mark.parametrize("error", NO_FAULTS)
def test_what_is_no_fault_of_the_machine(code: Callable[..., str], error: str) -> None:
    episode = played(code(f"raise {error}"), errors="zero")
    assert episode.reward == pytest.approx(NO_FAULTS[error], nan_ok=True)
    assert episode.tries == 1


ONCE = """
import os, sys
try: os.mkdir({place!r})
except FileExistsError: print(1.0)
else: sys.exit({ends})
"""
TOLD = {
    "space": "'OSError: [Errno 28] No space left on device'",
    "processes": "'bash: fork: retry: Resource temporarily unavailable'",
    "node": "'Error: ENOSPC: no space left on device, write\\\\n  errno: -28\\\\nNode.js v22'",
}
ENDS = {"container": "125", **TOLD}


@pytest.mark.process
async def test_a_command_that_met_a_fault_of_the_machine_is_run_again(tmp_path: Path) -> None:
    def agent(name: str) -> Agent:
        program = ONCE.format(place=str(tmp_path / name), ends=ENDS[name])
        return Agent(AgentConfig(command=(sys.executable, "-c", program), errors="zero"))

    again, *told = await asyncio.gather(*(served(agent(name)) for name in ENDS))
    assert (again.reward, again.error, again.tries) == (1.0, None, 2)
    for episode in told:  # the model may have written it
        assert np.isnan(episode.reward)
        assert episode.error is not None
        assert episode.tries == 1


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="what a command reads and writes is kept otherwise here")
async def test_no_files_to_start_a_command_with(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(AgentConfig(command=(sys.executable, "-c", "print(1.0)"), errors="zero"))
    allowed, opened = resource.getrlimit(resource.RLIMIT_NOFILE), os.memfd_create

    def none_at_first(name: str) -> int:
        try:
            return opened(name)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)

    monkeypatch.setattr(os, "memfd_create", none_at_first)
    async with Gateway(ScriptedSampler([]), ScriptedChat()).serving() as gateway:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, allowed[1]))
        episode = await agent.play(gateway, ROW, rl.Sampling())
    assert (episode.reward, episode.error, episode.tries) == (1.0, None, 2)


@pytest.mark.process
async def test_a_command_needs_no_room_for_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")  # nothing can be written there
    episode = await served(Agent(AgentConfig(command=(sys.executable, "-c", "print('x' * 200_000); print(1.0)"))))
    assert (episode.reward, episode.error) == (1.0, None)


GROUP = "async def tool(): raise rl.Discard('the tool is down')\nasync with asyncio.TaskGroup() as group:\n    "
DISCARDS = {
    "raised": "raise rl.Discard('the tool is down')",
    "status": "sys.exit(75)",
    "group": f"{GROUP}group.create_task(tool())",
}


@pytest.mark.parametrize("errors", ["mask", "zero", "stop"])
@pytest.mark.parametrize("body", DISCARDS.values(), ids=DISCARDS)
def test_a_program_discards_its_episode(code: Callable[..., str], body: str, errors: str) -> None:
    episode = played(code(body), errors=errors, retries=2)
    assert math.isnan(episode.reward)
    assert episode.error
    assert episode.tries == 1


def test_a_judge_discards_an_episode(code: Callable[..., str]) -> None:
    judge = code("raise rl.Discard('nothing was said')", "def f(transcripts, row, result)", "judge")
    episode = played(code("return 1.0"), reward=judge, errors="zero")
    assert math.isnan(episode.reward)
    assert episode.error == "Discard: nothing was said"


@pytest.mark.process
async def test_a_command_discards_its_episode() -> None:
    program = "import sys; print('the tool is down', file=sys.stderr); sys.exit(75)"
    episode = await served(Agent(AgentConfig(command=(sys.executable, "-c", program), errors="stop")))
    assert math.isnan(episode.reward)
    assert episode.error == "Discard: the tool is down"


REWARD = """
if completion == "wrapped" and tries < 3:
    try: raise OSError(errno.ENOSPC, "full")
    except OSError as error: raise RuntimeError("the compiler failed") from error
if completion == "wrong": raise ValueError("no")
if completion == "discarded": raise type("Mine", (rl.Discard,), {})("unreadable")
return 1.0
"""


@pytest.mark.process
async def test_a_reward_function_is_called_again_or_discards_the_row(code: Callable[..., str]) -> None:
    function = code(REWARD, "def f(prompt, completion, row)")
    reward = FunctionReward(rl.RewardConfig(function=function, errors="zero"))
    said = ["right", "wrapped", "wrong", "discarded"]
    scored = await reward.score(rl.Batch.of(prompt=said, completion=said))
    assert scored.rewards.tolist() == pytest.approx([1, 1, 0, math.nan], nan_ok=True)
    assert scored.objects("reward_error") == (None, None, "ValueError: no", "Discard: Mine: unreadable")


def test_a_reward_that_the_machine_has_no_room_for_is_unknown() -> None:
    def full(prompt: str, completion: str, row: object) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    reward, error = simulate(lambda: boundary(full, "", "", {}))
    assert math.isnan(reward)
    assert "no room 9 times in 26 s: OSError: [Errno 28] No space left" in str(error)


GAME = """
import errno
import meshrl as rl
made = []
class Game:
    def reset(self, row):
        self.prompt = row["prompt"]
        made.append(self.prompt)
        if self.prompt == "discarded":
            raise rl.Discard("no such level")
        if self.prompt == "again" and made.count("again") < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.prompt
    def step(self, completion):
        if self.prompt == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if self.prompt == "wrong":
            raise ValueError("no such move")
        return "", 1.0, True
"""


def test_an_environment_begins_again_or_discards_the_episode(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME, "utf-8")
    config = rl.EnvironmentConfig(source=f"{tmp_path / 'game.py'}:Game", errors="zero")
    prompts = ["again", "wrong", "full", "discarded"]

    async def main() -> rl.Batch:
        episodes = rl.Episodes(FakeSampler(rl.SamplerConfig(model="none")), FunctionEnvironment(config), config)
        batch = rl.Batch.of(prompt=prompts, answer=prompts, row=[{}] * 4, groups=np.arange(4))
        return await rl.rollout(episodes, batch, rl.Sampling(n=1))

    batch = simulate(main)
    order = [batch.objects("answer").index(prompt) for prompt in prompts]
    assert batch.rewards[order][:2].tolist() == [1, 0]
    assert np.isnan(batch.rewards[order][2:]).all()
    assert [bool(mask.any()) for mask in batch.loss_mask] == [
        prompt in prompts[:2] for prompt in batch.objects("answer")
    ]
