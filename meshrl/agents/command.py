"""A program that runs for one row, in a container or not, under a supervisor: all its processes end together."""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal, TypeAlias, cast

from meshrl import log
from meshrl.errors import ConfigError, Discard, MachineFault, MeshrlError, described, reports_no_space
from meshrl.supervisor import LONGEST, NOT_STARTED, supervised

Runtime: TypeAlias = Literal["docker", "podman"]
_ANSWERS: Final = 30.0
"""Seconds that a runtime has to report its version."""


def check_runtime(runtime: Runtime) -> None:
    """Raise ConfigError if the runtime is not installed or does not respond."""
    try:
        subprocess.run([runtime, "info"], capture_output=True, text=True, timeout=_ANSWERS, check=True)  # noqa: S603
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
        options = [part for name in variables for part in ("--env", name)]
        return [
            *(self.runtime, "run", "--rm", "--init", "--interactive", "--network", "host", "--name", self.name),
            *(*options, self.image, *command),
        ]

    @property
    def ending(self) -> Sequence[str]:
        """The command line that ends the container. Killing only the client would leave it running."""
        return self.runtime, "rm", "--force", "--volumes", self.name


_REPORTED: Final = 1 << 16
"""Bytes that are reported of each output stream at most, from its end."""
_LOOK: Final = 0.1
"""Seconds between two checks of how much the command has written."""


class CommandFailed(MeshrlError):
    """A command exited with a status other than 0, wrote too much, or returned no result."""


@dataclass
class Output:
    """The output of a command, filled in when it ends, however it ends."""

    most_bytes: int
    """Limit of its output, in bytes."""
    file: Path | None = None
    """File that keeps the output."""
    stdout: str = ""
    """The end of standard output."""
    stderr: str = ""
    """The end of standard error."""

    @property
    def text(self) -> str:
        """The end of both streams."""
        return self.stdout + self.stderr

    def read(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Read both streams from these files."""
        self.stdout, self.stderr = (_last(each, _REPORTED).decode(errors="replace") for each in (stdout, stderr))
        if self.file is not None:
            errors = _last(stderr, self.most_bytes)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_name(f".{self.file.name}.part")
            part.write_bytes(_last(stdout, self.most_bytes - len(errors)) + errors)
            part.replace(self.file)


async def run(
    command: Sequence[str],
    standard_input: bytes,
    environment: Mapping[str, str],
    output: Output,
    container: Container | None = None,
) -> None:
    """Run a command to its end.

    `environment` is added to this process's environment. Nothing that the command started is left when this returns,
    raises or is cancelled, or when this process is killed. The command is killed if it writes more than
    `output.most_bytes`. In a container it gets no other variables. Raises CommandFailed if it fails, Discard if its
    status is 75, and MachineFault if the machine could not run it or keep its output.
    """
    name = command[0] if command else container.runtime if container else ""
    try:
        status = await _run(command, standard_input, environment, output, container)
    except OSError as error:
        raise MachineFault(f"{name} could not be run, or its output kept: {described(error)}") from error
    if not status:
        return
    last = (output.stderr or output.stdout)[-400:].strip()
    if status == os.EX_TEMPFAIL:
        raise Discard(last or f"{name} ended with status {status}")
    if status == NOT_STARTED:
        raise MachineFault(f"{name} ended with status {status}: {last}")
    if reports_no_space(last):
        raise Discard(f"{name} ended with status {status}: {last}")
    raise CommandFailed(f"{name} ended with status {status}: {last}")


async def _run(
    command: Sequence[str],
    standard_input: bytes,
    environment: Mapping[str, str],
    output: Output,
    container: Container | None,
) -> int:
    """Run a command to its end, and return its status."""
    whole = supervised(container.running(command, environment), container.ending) if container else supervised(command)
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}  # opens the cluster
    with _file() as stdin, _file() as stdout, _file() as stderr:
        stdin.write(standard_input)
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *whole, stdin=stdin, stdout=stdout, stderr=stderr, env=inherited | dict(environment), start_new_session=True
        )
        try:
            await _ended(process, (stdout, stderr), output.most_bytes)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            status = await process.wait()
            output.read(stdout, stderr)
            if container and status == -signal.SIGALRM:
                left = f"{container.runtime} did not end the container {container.name} in {LONGEST} s"
                log.warning(f"{left}: look for it yourself")
    return status


def _file() -> IO[bytes]:
    """Open a file for a stream: in memory, so that no full disk spoils what a program reads and writes."""
    if hasattr(os, "memfd_create"):  # on Linux
        return os.fdopen(os.memfd_create("meshrl-agent"), "w+b")
    return tempfile.TemporaryFile()


async def _ended(process: asyncio.subprocess.Process, outputs: Sequence[IO[bytes]], most_bytes: int) -> None:
    while process.returncode is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK):
                await process.wait()
        if (wrote := sum(os.fstat(each.fileno()).st_size for each in outputs)) > most_bytes:
            raise CommandFailed(f"it wrote {wrote} bytes, more than {most_bytes} (output_mib), and was ended")


def _last(output: IO[bytes], most: int) -> bytes:
    size = os.fstat(output.fileno()).st_size
    output.seek(max(0, size - most))
    return output.read(most)


def result_of(stdout: str) -> object:
    """Read the last line of a command's output as JSON. Raises CommandFailed if it is not JSON."""
    last = (stdout.strip().splitlines() or [""])[-1]
    try:
        return cast("object", json.loads(last))
    except (ValueError, RecursionError):
        raise CommandFailed(
            f"the command succeeded, but its last line of output is not JSON: {last[:200]!r}. Let it print its reward "
            'there, such as 1.0 or {"reward": 1.0}, or judge it by agent.reward'
        ) from None
