"""Environments of the library verifiers: of a stand-in, and of the library itself where it is installed."""

import asyncio
import importlib
import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from meshrl import Batch, EnvironmentConfig, Episodes, SamplerConfig, Sampling, Task, TaskConfig, rollout
from meshrl.agents import Agent, AgentConfig, Episode, Gateway
from meshrl.environments.environment import FunctionEnvironment
from meshrl.errors import ConfigError
from meshrl.tasks.verifiers import load_episodes
from meshrl.testing import FakeSampler, ScriptedChat, ScriptedSampler

SOURCE = "verifiers:guess-number"
MARK = "<|im_start|>user\n"
SYSTEM = {"role": "system", "content": "Numbers only."}
ROWS = [
    {"prompt": [SYSTEM, {"role": "user", "content": f"1 to {most}?"}], "answer": str(answer), "example_id": answer}
    for answer, most in ((3, 9), (5, 8))
]
TOOL = {
    "name": "is_more",
    "description": "Whether the number is more.",
    "parameters": {"type": "object", "properties": {"than": {"type": "integer"}}},
}


def game(vf: Any, dataset: Any) -> type[Any]:  # noqa: C901 -- one class with five short methods
    """Guess a number. The rubric gives 1 for the answer, and 0.1 for each turn."""

    class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
        def __init__(self, kind: str = "", max_turns: int = 4) -> None:
            def right(completion: Any, answer: str) -> float:
                return float(answer in [each.content for each in completion if each.role == "assistant"])

            def turns(state: Any) -> float:
                return len(state["trajectory"]) / 10

            def together(states: Any) -> list[float]:
                return [0.0 for _ in states]

            self.kind, self.cleaned = kind, 0
            funcs = [right, turns, together] if kind == "group" else [right, turns]
            tools = [TOOL] if kind == "tools" else None
            super().__init__(dataset=dataset(ROWS), rubric=vf.Rubric(funcs=funcs), max_turns=max_turns, tool_defs=tools)

        async def setup_state(self, state: Any) -> Any:
            if self.kind == "setup":
                state["prompt"] = state["prompt"][1:]
            return state

        async def get_prompt_messages(self, state: Any) -> Any:
            found = await super().get_prompt_messages(state)
            return found[-1:] if self.kind == "rewrites" and state["trajectory"] else found

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            said = messages[-1]
            if self.kind == "tools" and said.tool_calls:
                answers = [
                    {
                        "role": "tool",
                        "tool_call_id": call.id,
                        "content": str(int(state["answer"]) > json.loads(call.arguments)["than"]),
                    }
                    for call in said.tool_calls
                ]
                return [*answers, {"role": "user", "content": said.content}]
            if said.content == "fail":
                raise vf.Error("told in the state")
            if int(said.content) == int(state["answer"]):
                state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return [{"role": "user", "content": "more" if said.content < state["answer"] else "less"}]

    return Guess


@pytest.fixture(params=["stand-in", "installed"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "stand-in":
        path = Path(__file__).with_name("verifiers_standin.py")
        spec = importlib.util.spec_from_file_location("verifiers_standin", path)
        assert spec
        assert spec.loader
        standin = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(standin)
        for name, module in standin.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        make, vf = list, sys.modules["verifiers"]
    else:
        vf = pytest.importorskip("verifiers")
        make = importlib.import_module("datasets").Dataset.from_list
    module = ModuleType("guess_number")
    vars(module)["load_environment"] = game(vf, make)
    monkeypatch.setitem(sys.modules, "guess_number", module)
    return vf


def told(batch: Batch, name: str) -> list[object]:
    return list(batch.objects(name))


def environment(kind: str = "", **changes: object) -> FunctionEnvironment:
    table = {"source": SOURCE, "options": {"kind": kind} if kind else {}, **changes}
    return FunctionEnvironment(EnvironmentConfig.model_validate(table))


def prompts(kind: str = "") -> Batch:
    options = {"kind": kind} if kind else {}
    config = TaskConfig.model_validate(
        {"source": SOURCE, "options": options, "held_out": 0, "prompt": "{system}" + MARK + "{question}"}
    )
    batch = Task.load(config).train
    return batch.assign(episode=np.arange(len(batch)))


@pytest.mark.usefixtures("library")
def test_a_task_has_the_rows_of_the_environment() -> None:
    batch = prompts()
    assert told(batch, "prompt") == [f"Numbers only.{MARK}1 to 9?", f"Numbers only.{MARK}1 to 8?"]
    assert told(batch, "answer") == ["3", "5"]
    shown = json.loads(cast("dict[str, str]", prompts("tools").objects("row")[0])["tools"])
    assert shown["function"]["name"] == "is_more"


@pytest.mark.usefixtures("library")
async def test_the_rubric_judges_an_episode_at_its_end() -> None:
    played = environment()
    begun = await played.reset(prompts())
    assert told(begun, "prompt") == told(prompts(), "prompt")
    first = await played.step(begun.assign(completion=["3", "7"]))
    assert told(first, "observation") == ["", "less"]
    assert first.row("done").tolist() == [True, False]
    assert first.rewards.tolist() == pytest.approx([1.1, 0])
    rest = first.select([1])
    for turn, (said, reward) in enumerate([("4", 0), ("4", 0), ("4", 0.4)]):
        rest = await played.step(rest.assign(completion=[said]))
        assert rest.row("done").tolist() == [turn == 2]
        assert rest.rewards.tolist() == pytest.approx([reward])
    assert told(rest, "reward_error") == [None]


@pytest.mark.usefixtures("library")
async def test_what_an_environment_raises_is_data_on_its_row() -> None:
    played = environment()
    begun = await played.reset(prompts())
    with capture_logs():
        first = await played.step(begun.assign(completion=["no number", "fail"]))
    assert told(first, "reward_error") == [
        "ValueError: invalid literal for int() with base 10: 'no number'",
        "Error: told in the state",
    ]
    assert first.row("done").tolist() == [True, True]
    assert first.rewards.tolist() == [0, 0]


@pytest.mark.usefixtures("library")
async def test_tools_are_called_and_answer_in_text() -> None:
    played = environment("tools")
    begun = await played.reset(prompts("tools"))
    call = '<tool_call>\n{"name": "is_more", "arguments": {"than": 4}}\n</tool_call>'
    first = await played.step(begun.assign(completion=[f"A look.\n{call}{call}", '5<tool_call>{"nam</tool_call>']))
    answer = "<tool_response>\nFalse\n</tool_response>"
    assert told(first, "observation")[0] == f"{answer}\n\n{answer}\n\nA look."
    assert str(told(first, "reward_error")[1]).startswith("ValueError: invalid literal for int()")


@pytest.mark.usefixtures("library")
async def test_a_conversation_that_does_not_grow_is_told() -> None:
    with capture_logs():
        begun = await environment("setup").reset(prompts())
    assert "the environment begins with a prompt that is not its row's" in str(told(begun, "reward_error")[0])
    played = environment("rewrites")
    begun = await played.reset(prompts())
    with capture_logs():
        first = await played.step(begun.assign(completion=["9", "5"]))
    assert "DataError: the environment rewrote the conversation" in str(told(first, "reward_error")[0])
    assert first.row("done").tolist() == [True, True]
    assert first.rewards.tolist() == pytest.approx([0, 1.1])


@pytest.mark.usefixtures("library")
async def test_signals_stay_with_the_script_and_ranks_may_be_threads() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    played = await asyncio.to_thread(environment)
    assert told(await played.reset(prompts()), "reward_error") == [None, None]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    await played.close(prompts())


@pytest.mark.usefixtures("library")
async def test_an_episode_that_is_not_over_is_ended() -> None:
    played = environment()
    begun = await played.reset(prompts())
    await played.step(begun.assign(completion=["9", "9"]))
    games: list[Any] = list(played._instances.values())
    await played.close(begun)
    assert [each._played.cancelled() for each in games] == [True, True]


@pytest.mark.usefixtures("library")
async def test_rows_of_another_source_are_told() -> None:
    with capture_logs():
        begun = await environment().reset(Batch.of(prompt=["a"], episode=np.arange(1)))
    assert told(begun, "reward_error") == [
        "DataError: the row has no 'verifiers': set task.source = \"verifiers:guess-number\", as of the environment"
    ]


@pytest.mark.usefixtures("library")
async def test_episodes_play_it() -> None:
    config = EnvironmentConfig(source=SOURCE)
    episodes = Episodes(FakeSampler(SamplerConfig(model="none")), FunctionEnvironment(config), config)
    with capture_logs():
        batch = await rollout(episodes, prompts().drop("episode"), Sampling(n=2))
    assert batch.row("turns").tolist() == [1] * 4
    assert all("invalid literal" in str(error) for error in batch.objects("reward_error"))


async def played_by_an_agent(kind: str, *said: str) -> Episode:
    """The first row, to which the model says this."""
    gateway = Gateway(ScriptedSampler(said), ScriptedChat())
    agent = Agent(AgentConfig(source=SOURCE, options={"kind": kind} if kind else {}))
    row = cast("dict[str, object]", prompts(kind).objects("row")[0])
    return await agent.play(gateway, row, Sampling(max_tokens=200))


@pytest.mark.usefixtures("library")
async def test_an_agent_plays_it_by_the_gateway() -> None:
    episode = await played_by_an_agent("", "7", "3")
    assert (episode.error, episode.turns) == (None, 2)
    assert episode.reward == pytest.approx(1.2)
    assert episode.rows.objects("prompt") == ("system: Numbers only.\nuser: 1 to 9?\nassistant: ",)
    assert episode.rows.objects("completion") == ("7\nuser: less\nassistant: 3",)
    assert [sum(row) for row in episode.rows.loss_mask] == [4]


@pytest.mark.usefixtures("library")
async def test_an_agent_calls_its_tools_and_may_have_several_conversations() -> None:
    call = '<tool_call>{"name": "is_more", "arguments": {"than": 4}}</tool_call>'
    episode = await played_by_an_agent("tools", f"A look.{call}", "3")
    assert (episode.error, len(episode.rows)) == (None, 1)
    assert "tool: False\nuser: A look.\n" in str(episode.rows.objects("completion")[0])
    rewritten = await played_by_an_agent("rewrites", "7", "3")
    assert (rewritten.error, len(rewritten.rows)) == (None, 2)


@pytest.mark.usefixtures("library")
async def test_what_it_raises_for_an_agent_is_data() -> None:
    with capture_logs():
        failed = await played_by_an_agent("", "fail")
        other = await Agent(AgentConfig(source=SOURCE)).play(
            Gateway(ScriptedSampler([]), ScriptedChat()), {"prompt": "a"}, Sampling()
        )
    assert (failed.reward, failed.error) == (0.0, "Error: told in the state")
    assert "the row has no 'verifiers'" in str(other.error)
    with pytest.raises(ConfigError, match="its rubric judges the rollouts of a prompt together"):
        Agent(AgentConfig(source=SOURCE, options={"kind": "group"}))


@pytest.mark.parametrize(
    ("options", "turns", "message"),
    [
        ({"kind": "group"}, 8, "its rubric judges the rollouts of a prompt together"),
        ({"max_turns": 10}, 8, "plays up to 10 turns, .* which turns = 8 cuts off: set turns = 10"),
        ({"most": 1}, 8, "cannot be loaded with options {'most': 1}: "),
    ],
)
@pytest.mark.usefixtures("library")
def test_an_environment_that_does_not_fit(options: dict[str, object], turns: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_episodes("guess-number", options, turns)


Load = Callable[[], object]


@pytest.mark.parametrize("load", [prompts, environment])
def test_without_the_library_it_is_told(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"needs verifiers: pip install 'meshrl\[verifiers\]'"):
        load()


def test_another_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("verifiers")
    vars(other)["__version__"] = "0.4.0"
    monkeypatch.setitem(sys.modules, "verifiers", other)
    with pytest.raises(ConfigError, match=r"verifiers is 0\.4\.0 here, and meshrl plays environments of 0\.3: pip"):
        environment()
