"""What is used of the library verifiers 0.3, made small: for tests where it is not installed."""

import importlib
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any


class OpenAIChatCompletionsClient:
    def __init__(self, client: Any) -> None:
        self.client = client

    async def get_response(self, prompt: Any, model: str) -> SimpleNamespace:
        told = await self.client.chat.completions.create(model=model, messages=list(map(vars, prompt)))
        return SimpleNamespace(role="assistant", content=told.choices[0].message.content)


class Error(Exception):
    """Told in a state."""


class Rubric:
    """Rewards of one rollout."""

    def __init__(self, funcs: Sequence[Callable[..., float]]) -> None:
        self.funcs = funcs

    async def score_rollout(self, state: dict[str, Any]) -> None:
        known = {"completion": state["completion"], "answer": state["answer"], "state": state}
        found = [func(**{name: known[name] for name in func.__code__.co_varnames[:2]}) for func in self.funcs]
        state["reward"] = sum(found)

    async def cleanup(self, state: dict[str, Any]) -> None:
        pass


class MultiTurnEnv:
    """Asks the client and the environment by turns."""

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
    """The library's modules by name."""
    names = ("", ".clients", ".envs", ".envs.environment")
    root, clients, envs, environment = (ModuleType(f"verifiers{name}") for name in names)
    vars(root).update(
        __version__="0.3.1", load_environment=load_environment, MultiTurnEnv=MultiTurnEnv, Rubric=Rubric, Error=Error
    )
    vars(clients)["OpenAIChatCompletionsClient"] = OpenAIChatCompletionsClient
    vars(environment).update(signal=signal)
    return {each.__name__: each for each in (root, clients, envs, environment)}
