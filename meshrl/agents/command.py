"""A command line as a program that is run for one row: its input and output in files, its processes ended together."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Final, cast

from meshrl.errors import MeshrlError

_TOLD: Final = 1 << 16
"""Bytes, at most, that are told of each of its two outputs: the last ones."""
_LOOK: Final = 1.0
"""Seconds between two looks at how much it has written."""


class CommandFailed(MeshrlError):
    """A command ended with another status than 0, wrote too much, or said no result."""


@dataclass
class Output:
    """What a command wrote, filled in as it ends, however that is."""

    text: str = ""


async def run(
    command: Sequence[str], given: bytes, environment: Mapping[str, str], most_bytes: int, output: Output
) -> object:
    """What its last line of output says, as JSON. CommandFailed where it fails; OSError where it cannot be started.

    `given` is its input and `environment` is added to ours. Its processes are a group, of which none is left when this
    returns, raises or is cancelled, but one that made a session of its own. It is ended where it writes more than
    `most_bytes`.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            await _ended(process, (stdout, stderr), most_bytes)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            said, complained = _last(stdout), _last(stderr)
            output.text = said + complained
    if process.returncode:
        raise CommandFailed(
            f"{command[0]} ended with status {process.returncode}: {(complained or said)[-400:].strip()}"
        )
    return _result(command[0], said)


async def _ended(process: asyncio.subprocess.Process, outputs: Sequence[IO[bytes]], most_bytes: int) -> None:
    while process.returncode is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK):
                await process.wait()
        if (wrote := sum(os.fstat(each.fileno()).st_size for each in outputs)) > most_bytes:
            raise CommandFailed(f"it wrote {wrote} bytes, more than {most_bytes} (output_mib), and was ended")


def _last(output: IO[bytes]) -> str:
    size = os.fstat(output.fileno()).st_size
    output.seek(max(0, size - _TOLD))
    return output.read(_TOLD).decode(errors="replace")


def _result(name: str, said: str) -> object:
    lines = said.strip().splitlines()
    try:
        return cast("object", json.loads(lines[-1] if lines else ""))
    except (ValueError, RecursionError):
        last = lines[-1][:200] if lines else ""
        raise CommandFailed(
            f"{name} ended well, and its last line of output is no JSON: {last!r}. Let it print its reward there, such "
            'as 1.0 or {"reward": 1.0}'
        ) from None
