"""A sandbox on a machine of which a service gives a shell and files.

Services differ in what a command may have. So a line of `sh` limits the command's time, feeds its input, and keeps the
end of its output.
"""

import asyncio
import math
import re
import secrets
import shlex
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import count
from pathlib import PurePosixPath
from typing import Final

from meshrl.errors import SandboxError
from meshrl.tasks import Ran, check_command

LIFE: Final = 3600
"""Seconds after which a service ends a machine that nobody has stopped."""
START: Final = 280
"""Seconds that a machine may take to start: fewer than the 300 that meshrl waits."""
GRACE: Final = 20
"""Seconds beyond a command's time until its service gives it up."""
ARGUMENT: Final = 1 << 17
"""Bytes of an argument that Linux refuses."""
INLINE: Final = 1 << 15
"""Bytes of a line that each service takes. A longer one travels as a file."""
FILE: Final = 16 << 20
"""Bytes of a file that is read at most."""

CHECK: Final = """for each in base64 mkdir tail tee wc
do command -v $each > /dev/null || printf '%s ' $each
done
timeout --version > /dev/null 2>&1 || printf %s "GNU's timeout"
echo; pwd
"""
"""Prints the tools that are missing, and the folder. Only GNU's `timeout` kills what a command has started."""
LINE: Final = """exec 4>&1 2> /dev/null
printf .
told=$({{ {{ {{
timeout -s KILL {seconds} sh -c '(exec "$@" 2>&1 5>&-); echo s$? >&5' sh {command} < {given} || [ $? != 126 ] ||
echo s127 >&5; }} 3>&- 4>&- |
timeout -s KILL {drained} tee /dev/fd/3 4>&- 5>&- | tail -c {kept} 3>&- 4>&- 5>&- | base64 >&4 3>&- 5>&-
}} 3>&1 | wc -c 4>&- 5>&-; }} 5>&1)
printf '.%s' "$told"
rm -f {files}
"""
"""Prints `.OUTPUT.sSTATUS SIZE`, without a status if `timeout` has killed the command.

The output goes to `tail` and, by the file 3, to `wc`. The end that `tail` keeps is printed by the file 4, and the
status goes by 5. Arguments that are too long in all keep the shell from starting `timeout`, which gives 126. What a
command leaves in the background may hold its output open: `tee` ends a second after its time.
"""
TOLD: Final = re.compile(r"(?:s(\d{1,3})\n)?\s*(\d+)\s*")
"""At most one status, and one size."""


class Shell(ABC):
    """A `meshrl.tasks.Sandbox` on a Linux machine with `sh`, `timeout` and the like.

    A service ends it after an hour. It has no network.
    """

    def __init__(self) -> None:
        self._ending, self._turn, self._numbers = AsyncExitStack(), asyncio.Lock(), count()
        self._folder, self._own = PurePosixPath("/"), f"/tmp/meshrl-{secrets.token_hex(8)}"  # noqa: S108 -- of the machine

    @abstractmethod
    async def _rent(self) -> None:
        """Start a machine, and put what ends it into `_ending`."""

    @abstractmethod
    async def _run(self, line: str, seconds: int) -> str:
        """Return what a line of `sh` prints. Raise if it takes longer than `seconds`."""

    @abstractmethod
    async def _download(self, path: str) -> bytes:
        """Read a file. `path` is absolute."""

    @abstractmethod
    async def _upload(self, path: str, content: bytes) -> None:
        """Write a file into a folder that is there. `path` is absolute."""

    async def start(self) -> None:
        """Rent a machine, and check that it has what is needed."""
        await self._rent()
        *_, missing, folder = (await self._run(CHECK, GRACE)).splitlines()
        if missing:
            raise SandboxError(f"its machine lacks {missing.strip()}: take an image that has it")
        self._folder = PurePosixPath(folder)

    async def stop(self) -> None:
        """End the machine, if there is one."""
        await self._ending.aclose()

    async def exec(
        self, command: str | Sequence[str], *, seconds: float = 60.0, stdin: bytes = b"", output_bytes: int = 65536
    ) -> Ran:
        """Run a line of `sh`, or a program with its arguments."""
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        check_command(argv, seconds, stdin, output_bytes)
        if not can_be_run(argv):
            return Ran(127, "", 0)
        line = shlex.join(argv)
        async with self._turn:
            with as_sandbox_error(f"the sandbox failed during {line[:100]!r}"):
                return await self._ran(line, seconds, stdin, output_bytes)

    async def _ran(self, command: str, seconds: float, stdin: bytes, most: int) -> Ran:
        number = next(self._numbers)
        given, script = f"{self._own}-{number}.in", f"{self._own}-{number}.sh"
        if stdin:
            await self._upload(given, stdin)
        line = LINE.format(
            command=command,
            seconds=f"{max(0.001, seconds):.3f}",
            drained=f"{seconds + 1:.3f}",
            given=given if stdin else "/dev/null",
            kept=max(1, most),  # a tail that keeps nothing reads nothing
            files=f"{given} {script}",
        )
        whole = line.encode(errors="surrogateescape")
        if len(whole) > INLINE or whole != line.encode(errors="replace"):  # no service takes bytes that are no text
            await self._upload(script, whole)
            line = f"sh {script}"
        _, encoded, told = (await self._run(line, math.ceil(seconds) + GRACE)).rsplit(".", 2)
        if not (numbers := TOLD.fullmatch(told)):
            why = "not one status and one size: a process in it disturbs it, so open a new one"
            raise ValueError(f"it told {told[:100]!r}, {why}")
        status, size = numbers.groups()
        output = b64decode(encoded)[-most:] if most else b""
        return Ran(int(status) if status else None, output.decode(errors="replace"), int(size) - len(output))

    async def read(self, path: str) -> bytes:
        """Read a file of at most 16 MiB."""
        sized = await self.exec(["sh", "-c", 'wc -c < "$1"', "sh", path])
        if sized.status != 0 or int(sized.output) > FILE:
            why = f"it has {int(sized.output)} bytes, more than {FILE}" if sized.status == 0 else told_by(sized)
            raise SandboxError(f"{path} of the sandbox cannot be read: {why}")
        with as_sandbox_error(f"{path} of the sandbox cannot be read"):
            return await self._download(str(self._folder / path))

    async def write(self, path: str, content: bytes | str) -> None:
        """Write a file, and the folders that lead to it."""
        place = self._folder / path
        made = await self.exec(["mkdir", "-p", "--", str(place.parent)])
        if made.status != 0:
            raise SandboxError(f"{path} of the sandbox cannot be written: {told_by(made)}")
        with as_sandbox_error(f"{path} of the sandbox cannot be written"):
            await self._upload(str(place), content.encode() if isinstance(content, str) else content)


def can_be_run(argv: Sequence[str]) -> bool:
    """Return False if no system runs it: a zero byte, half a character, or an argument that is too long."""
    try:
        encoded = [each.encode(errors="surrogateescape") for each in argv]
    except UnicodeEncodeError:
        return False
    return all(b"\0" not in each and len(each) < ARGUMENT for each in encoded)


def told_by(ran: Ran) -> str:
    """Return what a command has said, or its status."""
    return ran.output.strip() or f"status {ran.status}"


@contextmanager
def as_sandbox_error(what: str) -> Generator[None]:
    """Raise SandboxError for all that a service raises: its own errors, its HTTP client's, and Exception itself."""
    try:
        yield
    except Exception as error:
        raise SandboxError(f"{what}: {type(error).__name__}: {error}") from error
