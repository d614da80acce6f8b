"""Environments of the library verifiers: of the library itself where it is installed, else of a stand-in."""

import asyncio
import importlib
import importlib.util
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import isnan
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from meshrl import Batch, Sampling, Task, TaskConfig
from meshrl.agents import Agent, AgentConfig, Episode, Gateway
from meshrl.errors import ConfigError
from meshrl.testing import ScriptedChat, ScriptedSampler

pytestmark = pytest.mark.usefixtures("library")
SOURCE = "verifiers:guess-number"
SYSTEM = {"role": "system", "content": "Numbers only."}
ROWS = [
    {"prompt": [SYSTEM, {"role": "user", "content": f"1 to {most}?"}], "answer": str(answer), "example_id": answer}
    for answer, most in ((3, 9), (5, 8))
]


# --- what is used of the library 0.3, made small: for where it is not installed


class OpenAIChatCompletionsClient:
    def __init__(self, client: Any) -> None:
        self.client = client

    async def get_response(self, prompt: Any, model: str) -> SimpleNamespace:
        told = await self.client.chat.completions.create(model=model, messages=list(map(vars, prompt)))
        return SimpleNamespace(role="assistant", content=told.choices[0].message.content)


class Error(Exception):
    """Told in a state."""


class Rubric:
    def __init__(self, funcs: Sequence[Callable[..., float]]) -> None:
        self.funcs = funcs

    async def score_rollout(self, state: dict[str, Any]) -> None:
        known = {"completion": state["completion"], "answer": state["answer"], "state": state}
        found = [func(**{name: known[name] for name in func.__code__.co_varnames[:2]}) for func in self.funcs]
        state["reward"] = sum(found)

    async def cleanup(self, state: dict[str, Any]) -> None:
        pass


class MultiTurnEnv:
    score_rollouts = True
    env_response: Callable[..., Coroutine[Any, Any, list[dict[str, str]]]]

    def __init__(self, dataset: list[dict[str, Any]], rubric: Rubric, max_turns: int) -> None:
        told = sys.modules["verifiers.envs.environment"].signal
        told.signal(told.SIGINT, told.default_int_handler)
        self.dataset, self.rubric, self.max_turns = dataset, rubric, max_turns

    @property
    def requires_group_rollouts(self) -> bool:
        return any("states" in func.__code__.co_varnames for func in self.rubric.funcs)

    def get_dataset(self, n: int = -1) -> list[dict[str, Any]]:
        return self.dataset[:n] if n > 0 else self.dataset

    async def rollout(self, given: Any, client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        messages = [SimpleNamespace(**each) for each in given["prompt"]]
        first = len(messages)
        state: dict[str, Any] = {**given, "trajectory": [], "error": None, "completion": []}
        try:
            while len(state["trajectory"]) != self.max_turns and not state.get("final_env_response"):
                messages.append(await client.get_response(messages, model))
                state["trajectory"].append({"completion": messages[-1:]})
                state["completion"] = messages[first:]
                told = await self.env_response(messages, state)
                messages += [SimpleNamespace(**each) for each in told]
        except Error as error:
            state["error"] = error
        return state


def load_environment(env_id: str, **env_args: object) -> MultiTurnEnv:
    found: MultiTurnEnv = importlib.import_module(env_id.replace("-", "_")).load_environment(**env_args)
    return found


def modules() -> dict[str, ModuleType]:
    names = ("", ".clients", ".envs", ".envs.environment")
    root, clients, envs, environment = (ModuleType(f"verifiers{name}") for name in names)
    vars(root).update(
        __version__="0.3.1", load_environment=load_environment, MultiTurnEnv=MultiTurnEnv, Rubric=Rubric, Error=Error
    )
    vars(clients)["OpenAIChatCompletionsClient"] = OpenAIChatCompletionsClient
    vars(environment).update(signal=signal)
    return {each.__name__: each for each in (root, clients, envs, environment)}


# --- an environment, and how it is played


def game(vf: Any, dataset: Any) -> type[Any]:
    """Guess a number. The rubric gives 1 for the answer, and 0.1 for each turn."""

    class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
        def __init__(self, kind: str = "") -> None:
            def right(completion: Any, answer: str) -> float:
                return float(answer in [each.content for each in completion if each.role == "assistant"])

            def turns(state: Any) -> float:
                return len(state["trajectory"]) / 10

            def together(states: Any) -> list[float]:
                return [0.0 for _ in states]

            funcs = [right, turns, together] if kind == "group" else [right, turns]
            super().__init__(dataset=dataset(ROWS), rubric=vf.Rubric(funcs=funcs), max_turns=4)

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            said = messages[-1].content
            if said == "fail":
                raise vf.Error("told in the state")
            if int(said) == int(state["answer"]):
                state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return [{"role": "user", "content": "more" if said < state["answer"] else "less"}]

    return Guess


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("verifiers"):
        make = importlib.import_module("datasets").Dataset.from_list
    else:
        for name, module in modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        make = list
    vf = importlib.import_module("verifiers")
    module = ModuleType("guess_number")
    vars(module)["load_environment"] = game(vf, make)
    monkeypatch.setitem(sys.modules, "guess_number", module)
    return vf


def agent(**options: object) -> Agent:
    return Agent(AgentConfig.model_validate({"source": SOURCE, "options": options}))


def prompts() -> Batch:
    return Task.load(TaskConfig(source=SOURCE, held_out=0, prompt="{system} {question}", answer="{answer}")).train


async def played(*said: str, row: Mapping[str, object] | None = None) -> Episode:
    first = cast("dict[str, object]", prompts().objects("row")[0])
    return await agent().play(Gateway(ScriptedSampler(said), ScriptedChat()), row or first, Sampling(max_tokens=200))


def test_a_task_has_the_rows_of_the_environment() -> None:
    batch = prompts()
    assert list(batch.objects("prompt")) == ["Numbers only. 1 to 9?", "Numbers only. 1 to 8?"]
    assert list(batch.objects("answer")) == ["3", "5"]


async def test_its_rollout_plays_and_its_rubric_judges() -> None:
    episode = await played("7", "3")
    assert (episode.error, episode.turns) == (None, 2)
    assert episode.reward == pytest.approx(1.2)
    assert episode.rows.objects("prompt") == ("system: Numbers only.\nuser: 1 to 9?\nassistant: ",)
    assert episode.rows.objects("completion") == ("7\nuser: less\nassistant: 3",)
    assert [sum(row) for row in episode.rows.loss_mask] == [4]


async def test_what_it_raises_is_data() -> None:
    with capture_logs():
        raised, told, other = await played("no number"), await played("fail"), await played(row={"prompt": "a"})
    assert isnan(raised.reward)
    assert raised.error == "ValueError: invalid literal for int() with base 10: 'no number'"
    assert (isnan(told.reward), told.error) == (True, "Error: told in the state")
    assert "the row has no 'verifiers': set task.source = \"verifiers:guess-number\"" in str(other.error)


async def test_signals_stay_with_the_script_and_it_may_be_loaded_in_a_thread() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = list(map(signal.getsignal, numbers))
    await asyncio.to_thread(agent)
    assert list(map(signal.getsignal, numbers)) == before


def test_an_environment_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="its rubric judges the rollouts of a prompt together"):
        agent(kind="group")
    with pytest.raises(ConfigError, match=r"cannot be loaded with options {'most': 1}: "):
        agent(most=1)
