"""Commands in containers, by a runtime's own client: docker or podman."""

import asyncio
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from meshrl import log
from meshrl.errors import ConfigError

Runtime: TypeAlias = Literal["docker", "podman"]
_ANSWERS: Final = 30.0
"""Seconds that a runtime has to report its version, or to stop a container."""


def check_runtime(runtime: Runtime) -> None:
    """Raise ConfigError if the runtime is not installed or does not respond."""
    try:
        subprocess.run(  # noqa: S603
            [runtime, "info"], capture_output=True, text=True, timeout=_ANSWERS, check=True
        )
        return
    except FileNotFoundError:
        wrong = f"there is no program {runtime!r}"
    except subprocess.TimeoutExpired:
        wrong = f"no answer in {_ANSWERS:g} seconds"
    except subprocess.CalledProcessError as error:
        wrong = cast("str", error.stderr).strip()[-400:] or f"it ended with status {error.returncode}"
    raise ConfigError(
        f"an agent's image needs {runtime}, which does not work here: {wrong}. Install and start it, take another "
        "`runtime`, or leave `image` out, and the command runs as a process of this machine"
    )


@dataclass(frozen=True)
class Container:
    """One container, which is removed when its program has ended."""

    runtime: Runtime
    image: str
    name: str

    def running(self, command: Sequence[str], variables: Iterable[str]) -> Sequence[str]:
        """The command line that runs the command inside, with these variables and on this machine's network."""
        given = [part for name in variables for part in ("--env", name)]
        return [
            *(self.runtime, "run", "--rm", "--init", "--interactive", "--network", "host", "--name", self.name),
            *(*given, self.image, *command),
        ]

    async def end(self) -> None:
        """Stop the container. Killing only the client would leave it running."""
        quiet = asyncio.subprocess.DEVNULL
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWERS):
                ending = await asyncio.create_subprocess_exec(
                    *(self.runtime, "rm", "--force", "--volumes", self.name), stdout=quiet, stderr=quiet
                )
                await ending.wait()
                return
        log.warning(f"{self.runtime} did not end the container {self.name} in {_ANSWERS:g} s: look for it yourself")
