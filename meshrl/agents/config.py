"""The table of an agent: which program or tools talk to the model, and how they are found before a run."""

import inspect
import shutil
from collections.abc import Callable, Mapping
from typing import Annotated, Self

from pydantic import Field, JsonValue, model_validator

from meshrl.agents.command import Runtime, check_runtime
from meshrl.agents.tools import check_servers, player
from meshrl.config import CODE, Config
from meshrl.data import OnError
from meshrl.errors import ConfigError
from meshrl.tasks import check_awaits, takes_sandbox, verifiers
from meshrl.user_code import load_name, signature_of


class AgentConfig(Config):
    """The program that talks to the model: a function, or a command."""

    source: Annotated[str, CODE] = ""
    """A function, async or not: `file.py:function` or `package.module:function`. It gets a client of the package openai
    and the task's row, and returns the reward. Or `verifiers:TASKSET`, an environment of that library."""
    options: Mapping[str, JsonValue] = Field(default={})
    """For verifiers: `python` and `env`, as in the task."""
    command: tuple[str, ...] = ()
    """A program and its arguments. OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are in its environment, the same
    with ANTHROPIC, and the row is on its standard input as JSON. The last line of its output is the reward."""
    tools: tuple[str, ...] = ()
    """MCP servers whose tools the model calls, instead of a program: `mcp:URL`, or `mcp:` and a command. meshrl runs
    the calls, and `reward` judges the episode."""
    turns: int = Field(default=16, gt=0)
    """With `tools`: answers of the model at most."""
    tool_timeout: float = Field(default=60.0, gt=0)
    """With `tools`: time limit of a call in seconds."""
    tool_output: int = Field(default=20_000, gt=0)
    """With `tools`: characters of a result that the model gets at most."""
    reward: Annotated[str, CODE] = ""
    """A function that judges an episode, named as in `source`, async or not. It is called with the episode's
    transcripts, the task's row and what the program returned, or a command wrote, and returns the reward."""
    sandbox: str = ""
    """The sandbox of each episode, for the functions of `source` and `reward` that have a parameter `sandbox`: `local`,
    `container:IMAGE`, or one that a package adds."""
    image: str = ""
    """Container image in which the command runs. Without a command, the image's own command runs."""
    runtime: Runtime = "docker"
    """The program that runs containers."""
    timeout: float = Field(default=600.0, gt=0)
    """Time limit of an episode in seconds."""
    retries: int = Field(default=0, ge=0)
    """Number of times that a failed episode is repeated before its error is reported."""
    errors: OnError = "mask"
    """What becomes of an episode that failed or took too long. `mask`: its reward is unknown, and nothing is learned
    from it. `zero`: its reward is 0. `stop`: the run ends."""
    concurrency: int = Field(default=256, gt=0)
    """Episodes that run at once. Others wait."""
    output_mib: int = Field(default=16, gt=0)
    """Output of a command at most, in MiB."""
    outputs_kept: int = Field(default=1000, gt=0)
    """Number of commands whose output is kept in the run's folder. The oldest output is deleted first."""

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if [bool(self.source), bool(self.command or self.image), bool(self.tools)].count(True) != 1:
            raise ValueError(
                'give one of source, such as "my_agent.py:solve", command, such as ["node", "agent.js"], or image, and '
                'tools, such as ["mcp:http://127.0.0.1:8000/mcp"]'
            )
        if self.reward and self.source.startswith(f"{verifiers.NAME}:"):
            raise ValueError("an environment of verifiers rewards its episodes itself: leave out reward")
        if self.tools and not self.reward:
            raise ValueError(
                "with tools there is no program that returns a reward: name the function that judges, reward"
            )
        return self


def load_agent(config: AgentConfig) -> Callable[..., object] | None:
    """Load the agent's function, None for a command. Raises ConfigError if the function or the program is not found.

    A program in an image is not checked. Instead the container runtime is checked.
    """
    source = config.source
    if config.tools:
        check_servers(config.tools)
        return player(config.tools, config.turns, config.tool_timeout, config.tool_output)
    if config.image:
        check_runtime(config.runtime)
        return None
    if not source:
        program = config.command[0]
        if shutil.which(program) is None:
            raise ConfigError(f"agent.command: there is no program {program!r} here: install it, or give its path")
        return None
    kind, _, name = source.partition(":")
    if kind == verifiers.NAME:
        return verifiers.load_agent(name, config.options)
    return _function("agent", source, "a client", "a row")


def load_reward(config: AgentConfig) -> Callable[..., object] | None:
    """Load the function that judges episodes. None if the program judges them. ConfigError if it does not fit."""
    if not config.reward:
        return None
    return _function("agent.reward", config.reward, "the transcripts", "a row", "what the program returned")


def _function(what: str, source: str, *arguments: str) -> Callable[..., object]:
    function = load_name(what, source, (), inspect.isfunction)
    if not callable(function):
        raise ConfigError(f"{what} {source!r}: is {function!r}, not a function")
    check_awaits(f"{what} {source!r}", function)
    try:
        signature_of(function).bind(*arguments, **({"sandbox": "a sandbox"} if takes_sandbox(function) else {}))
    except TypeError as error:
        called = f"{', '.join(arguments[:-1])} and {arguments[-1]}"
        raise ConfigError(f"{what} {source!r}: is called with {called}, and does not fit: {error}") from error
    return function
