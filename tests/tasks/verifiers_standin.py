"""What is used of the library verifiers 0.3, made small: for tests where it is not installed."""

import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any


class OpenAIChatCompletionsClient:
    """Asks a server for the model's words."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def get_response(self, prompt: Any, model: str, tools: Any, sampling_args: Any, state: Any) -> Any:
        offered = [{"type": "function", "function": each.model_dump(exclude_none=True)} for each in tools or ()]
        told = await self.client.chat.completions.create(
            model=model, messages=[_native(each) for each in prompt], **({"tools": offered} if offered else {})
        )
        said = told.choices[0].message
        calls = [
            SimpleNamespace(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in said.tool_calls or ()
        ]
        return SimpleNamespace(message=Message(content=said.content, tool_calls=calls or None))


def _native(message: Any) -> dict[str, Any]:
    fields = {name: value for name, value in vars(message).items() if value is not None}
    if calls := fields.pop("tool_calls", None):
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return fields


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

    def __init__(
        self, dataset: list[dict[str, Any]], rubric: Rubric, max_turns: int = -1, tool_defs: Any = None
    ) -> None:
        told = sys.modules["verifiers.envs.environment"].signal
        told.signal(told.SIGINT, told.default_int_handler)
        self.dataset, self.rubric, self.max_turns = dataset, rubric, max_turns
        self.tool_defs = tool_defs and [Message(**each) for each in tool_defs]

    @property
    def requires_group_rollouts(self) -> bool:
        return any("states" in func.__code__.co_varnames for func in self.rubric.funcs)

    def get_dataset(self, n: int = -1) -> list[dict[str, Any]]:
        return self.dataset[:n] if n > 0 else self.dataset

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    async def env_response(self, messages: list[Any], state: dict[str, Any]) -> list[dict[str, str]]:
        raise NotImplementedError

    async def get_prompt_messages(self, state: dict[str, Any]) -> list[Any]:
        if not state["trajectory"]:
            return list(state["prompt"])
        messages = [*state["trajectory"][-1]["prompt"], *state["trajectory"][-1]["completion"]]
        return [*messages, *(Message(**each) for each in await self.env_response(messages, state))]

    async def rollout(self, given: Any, client: Any, model: str, sampling_args: Any) -> dict[str, Any]:
        state: dict[str, Any] = {
            **given,
            "prompt": [Message(**each) for each in given["prompt"]],
            "trajectory": [],
            "error": None,
        }
        state["completion"] = []
        try:
            await self.setup_state(state)
            while len(state["trajectory"]) != self.max_turns:
                prompt = await self.get_prompt_messages(state)
                if state.get("final_env_response"):
                    break
                response = await client.get_response(
                    prompt=prompt, model=model, tools=self.tool_defs, sampling_args=sampling_args, state=state
                )
                state["trajectory"].append({"prompt": prompt, "completion": [response.message]})
                state["completion"] = [*prompt, response.message][len(state["prompt"]) :]
        except Error as error:
            state["error"] = error
        return state


class Message(SimpleNamespace):
    """Of any role; also a tool."""

    def __init__(self, role: str = "assistant", **fields: object) -> None:
        super().__init__(role=role, **fields)

    def model_dump(self, exclude_none: bool) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "role"}


def load_environment(env_id: str, **env_args: object) -> MultiTurnEnv:
    """As the library's."""
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
