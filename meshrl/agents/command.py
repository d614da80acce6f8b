"""A command line as a program that runs for one row: input and output in files, all its processes end together."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

from meshrl.agents.container import Container
from meshrl.errors import MeshrlError

_TOLD: Final = 1 << 16
"""Bytes that are reported of each output stream at most, from its end."""
_LOOK: Final = 1.0
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
    said: str = ""
    """The end of standard output."""
    complained: str = ""
    """The end of standard error."""

    @property
    def text(self) -> str:
        """The end of both streams."""
        return self.said + self.complained

    def take(self, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Read both streams from these files."""
        self.said, self.complained = (_last(each, _TOLD).decode(errors="replace") for each in (stdout, stderr))
        if self.file is not None:
            wrong = _last(stderr, self.most_bytes)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_name(f".{self.file.name}.part")
            part.write_bytes(_last(stdout, self.most_bytes - len(wrong)) + wrong)
            part.replace(self.file)


async def run(
    command: Sequence[str],
    given: bytes,
    environment: Mapping[str, str],
    output: Output,
    container: Container | None = None,
) -> None:
    """Run a command to its end.

    `given` is its input. `environment` is added to this process's environment. The command's processes form a group.
    None of the group is left when this returns, raises or is cancelled, except a process that started its own session.
    The command is killed if it writes more than `output.most_bytes`. In a container it gets no other variables, and
    nothing that it started survives. Raises CommandFailed if it fails, and OSError if it cannot be started.
    """
    whole = container.running(command, environment) if container else command
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *whole,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            await _ended(process, (stdout, stderr), output.most_bytes)
        finally:
            ended = process.returncode is not None
            _end_group(process)
            await process.wait()
            output.take(stdout, stderr)
            if container and not ended:
                await container.end()
    if process.returncode:
        last = (output.complained or output.said)[-400:].strip()
        raise CommandFailed(f"{command[0] if command else whole[0]} ended with status {process.returncode}: {last}")


def _end_group(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of the group. If its number belongs to a new process, the group was empty."""
    if process.returncode is not None and _runs(process.pid):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


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


def result_of(said: str) -> object:
    """Read the last line of a command's output as JSON. Raises CommandFailed if it is not JSON."""
    lines = said.strip().splitlines()
    try:
        return cast("object", json.loads(lines[-1] if lines else ""))
    except (ValueError, RecursionError):
        last = lines[-1][:200] if lines else ""
        raise CommandFailed(
            f"the command succeeded, but its last line of output is not JSON: {last!r}. Let it print its reward there, "
            'such as 1.0 or {"reward": 1.0}, or judge it by agent.reward'
        ) from None
