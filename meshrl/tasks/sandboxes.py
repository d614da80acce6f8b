r"""Sandboxes that stay: a user's code runs a model's commands in one, until the episode ends.

    async with open_sandbox("local") as sandbox:
        await sandbox.write("sum.py", "print(1 + 1)")
        ran = await sandbox.exec("python sum.py")
        ran.status, ran.output      # 0, "2\n"

`local` has the limits of `sandbox.py`, `container:IMAGE` is a container of this machine, and packages add others by the
entry point `meshrl.sandboxes`. A sandbox that does not start is a fault of the machine.
"""

import asyncio
import errno
import json
import math
import secrets
import shutil
import signal
from abc import ABC, abstractmethod
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from typing import Final, Protocol, TypeAlias, cast

from meshrl import log
from meshrl.errors import ConfigError, MachineFault, SandboxError, described, did_you_mean
from meshrl.supervisor import LONGEST, supervised
from meshrl.tasks.sandbox import Limits, check_safe, prepared, variables
from meshrl.user_code import is_async, signature_of

_GROUP: Final = "meshrl.sandboxes"
_LIMITS: Final = Limits(memory_mib=4096, processes=64, files_mib=256, output_bytes=16 << 20)
"""Limits of `local`. `timeout` is that of each command."""
_STARTS: Final = 300.0
"""Seconds that a sandbox may take to start. An image may have to be downloaded."""
_GRACE: Final = 10.0
"""Seconds beyond a command's time until its sandbox counts as hung."""
_FILE: Final = 16 << 20
"""Bytes of a file that is read at most."""
_READ: Final = 1 << 16


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    status: int | None
    """Its exit status, as a shell has it: 128 plus the signal that killed it. None if it exceeded its time."""
    output: str
    """The end of what it wrote to both streams."""
    left_out: int
    """Bytes of its output before that."""


class Sandbox(Protocol):
    """A place where commands run. Its files stay, and what runs in the background, until it stops.

    Raises SandboxError if it has ended, for example because a command ended it.
    """

    async def start(self) -> None:
        """Start it. What this raises is a fault of the machine."""
        ...

    async def exec(
        self, command: str | Sequence[str], *, seconds: float = 60.0, stdin: bytes = b"", output_bytes: int = 65536
    ) -> Ran:
        """Run a line of `sh`, or a program with its arguments, to its end. It is killed after `seconds`.

        `output_bytes`: the output that is kept, in bytes.
        """
        ...

    async def read(self, path: str) -> bytes:
        """Read a file. SandboxError if it cannot be read, or has more than 16 MiB."""
        ...

    async def write(self, path: str, content: bytes | str) -> None:
        """Write a file, and the folders that lead to it. SandboxError if it cannot be written."""
        ...

    async def stop(self) -> None:
        """End all that runs in it, and remove it. It may not have started."""
        ...


@asynccontextmanager
async def open_sandbox(name: str) -> AsyncGenerator[Sandbox]:
    """Start a sandbox, and stop it at the end, however that comes.

    `name`: `local`, `container:IMAGE`, or `ENTRY:ARGUMENT` with an entry point of the group `meshrl.sandboxes`. Raises
    ConfigError for an unknown name, and MachineFault if it does not start.
    """
    sandbox = await _begin(name)
    try:
        yield sandbox
    finally:
        await _end(sandbox)


async def _begin(name: str) -> Sandbox:
    sandbox = _make_sandbox(name)
    try:
        async with asyncio.timeout(_STARTS):
            await sandbox.start()
    except Exception as error:
        await _end(sandbox)
        raise MachineFault(f"the sandbox {name!r} did not start: {described(error)}") from error
    except BaseException:
        await _end(sandbox)
        raise
    return sandbox


async def _end(sandbox: Sandbox) -> None:
    try:
        await sandbox.stop()
    except Exception as error:  # noqa: BLE001 -- what the episode was worth does not depend on it
        log.warning("a sandbox could not be stopped: look for it yourself", error=described(error))


def _make_sandbox(name: str) -> Sandbox:
    kind, _, argument = name.partition(":")
    if name == "local":
        check_safe("the sandbox local", "take one of the kind container:IMAGE")
        return _Local()
    if kind == "container" and argument:
        return _Container(_runtime(), argument)
    for entry in entry_points(group=_GROUP, name=kind):
        try:
            make = cast("Callable[[str], Sandbox]", entry.load())
        except Exception as error:
            why = f"the package that adds it does not load {entry.value}"
            raise ConfigError(f"sandbox {name!r}: {why}: {described(error)}: mend or install it") from error
        return make(argument)
    installed = sorted(entry_points(group=_GROUP).names)
    written = ", ".join(("local", "container:IMAGE", *(f"{each}:ARGUMENT" for each in installed)))
    hint = did_you_mean(kind, ("local", "container", *installed))
    raise ConfigError(f"sandbox {name!r}: write {written}" + (hint and f"; {hint}"))


def _runtime() -> str:
    runtimes = ("docker", "podman", "apptainer")
    for runtime in runtimes:
        if shutil.which(runtime):
            return runtime
    raise ConfigError(f"a container needs one of {', '.join(runtimes)} on PATH: install one, or take the sandbox local")


def takes_sandbox(function: Callable[..., object]) -> bool:
    """True if a function has a parameter `sandbox`."""
    try:
        return "sandbox" in signature_of(function).parameters
    except ValueError:  # a builtin without a signature
        return False


def check_sandbox(key: str, name: str, functions: Iterable[Callable[..., object]]) -> None:
    """Raise ConfigError if functions ask for a sandbox without `key`, or none asks with it, or there is no such one."""
    taking = [function for function in functions if takes_sandbox(function)]
    if name and not taking:
        raise ConfigError(f"{key} = {name!r}, and nothing takes one: give your function a parameter `sandbox`")
    if taking and not name:
        raise ConfigError(f'{taking[0].__qualname__} takes a sandbox: set {key}, such as to "local"')
    if name:
        _make_sandbox(name)


def check_awaits(what: str, function: Callable[..., object]) -> None:
    """Raise ConfigError for a plain function that takes a sandbox."""
    if takes_sandbox(function) and not is_async(function):
        raise ConfigError(f"{what} takes a sandbox, whose methods are awaited: write `async def`")


class Sandboxes:
    """The sandboxes of a user's code in one process, by numbers."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started: dict[int, Sandbox] = {}

    async def start(self, number: int) -> None:
        """Start one. Raises as `open_sandbox`."""
        self._started[number] = await _begin(self._name)

    def of(self, number: int) -> Sandbox:
        """Return a sandbox that was started. MachineFault if another call has ended its process."""
        if number not in self._started:
            raise MachineFault("the sandbox is lost, because another call ended its process")
        return self._started[number]

    async def stop(self, number: int) -> None:
        """Stop one, if it was started."""
        if sandbox := self._started.pop(number, None):
            await _end(sandbox)


async def started(start: Awaitable[None], limit: str) -> None:
    """Wait for a start in another process. MachineFault if it takes longer than that process's calls may."""
    try:
        await start
    except TimeoutError as error:
        raise MachineFault(f"the sandbox did not start within {limit}") from error


_Outcome: TypeAlias = tuple[int | None, bytes, int]
"""The status of a command, the end of its output, and the number of bytes before that."""


class _Commands(ABC):
    """A sandbox that does all by commands, one at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turn = asyncio.Lock()

    @abstractmethod
    async def _run(self, command: Sequence[str], seconds: float, given: bytes, most: int) -> _Outcome:
        """Run a command to its end, or kill it after these seconds."""

    async def exec(
        self, command: str | Sequence[str], *, seconds: float = 60.0, stdin: bytes = b"", output_bytes: int = 65536
    ) -> Ran:
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        status, output, left_out = await self._in_turn(argv, seconds, stdin, output_bytes)
        return Ran(status, output.decode("utf-8", "replace"), left_out)

    async def read(self, path: str) -> bytes:
        line = ["sh", "-c", 'cat < "$1"', "sh", path]
        status, content, left_out = await self._in_turn(line, 60.0, b"", _FILE)
        if status or status is None or left_out:
            why = (
                f"it has {len(content) + left_out} bytes, more than {_FILE}" if left_out else _message(status, content)
            )
            raise SandboxError(f"{path} of the sandbox cannot be read: {why}")
        return content

    async def write(self, path: str, content: bytes | str) -> None:
        folder = str(PurePosixPath(path).parent)
        line = ["sh", "-c", 'mkdir -p -- "$1" && cat > "$2"', "sh", folder, path]
        status, output, _ = await self._in_turn(
            line, 60.0, content.encode() if isinstance(content, str) else content, _READ
        )
        if status != 0:
            raise SandboxError(f"{path} of the sandbox cannot be written: {_message(status, output)}")

    async def _in_turn(self, command: Sequence[str], seconds: float, given: bytes, most: int) -> _Outcome:
        check_command(command, seconds, given, most)
        async with self._turn:
            if self._process is None or self._process.returncode is not None:
                raise SandboxError("the sandbox has ended, or did not start")
            return await self._run(command, seconds, given, most)

    async def _launch(self, command: Sequence[str], ending: Sequence[str] = (), inside: Path | None = None) -> None:
        """Start the process that the sandbox lives as long as, under a supervisor, and wait until it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *supervised(command, ending),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
            limit=1 << 20,
            cwd=inside,
            env=variables(inside) if inside else None,
        )

    async def _is_ready(self) -> None:
        process = cast("Process", self._process)
        errors, output = _OutputTail(_READ), cast("asyncio.StreamReader", process.stdout)
        while (line := await output.readline()) != b"ready\n":
            if not line:
                await errors.read(process.stderr)
                raise SandboxError(f"status {await process.wait()}: {_message(0, errors.kept)}")

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        _read_no_more(process)
        if await process.wait() == -signal.SIGALRM:
            raise SandboxError(f"its runtime did not end it in {LONGEST} s")


def check_command(command: Sequence[object], seconds: float, given: object, most: object) -> None:
    """Raise TypeError or ValueError for wrong arguments of `exec`, before the sandbox gets them.

    `command` is a program and its arguments, with `given` as its input. It may take `seconds`, and `most` bytes of its
    output are kept.
    """
    if wrong := [each for each in command if not isinstance(each, str)]:
        raise TypeError(f"a sandbox takes commands and paths as texts, not {wrong[0]!r}")
    if not isinstance(given, bytes | bytearray):
        raise TypeError(
            f"a sandbox takes the input of a command and a file as bytes, not {type(given).__name__}: encode it"
        )
    if not isinstance(most, int):
        raise TypeError(f"output_bytes is a whole number, not {most!r}")
    if not command:
        raise ValueError("a command of a sandbox has at least the name of a program, and this one is empty")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds of a command = {seconds}: it is more than 0, and finite")
    if most < 0:
        raise ValueError(f"output_bytes = {most}: it is at least 0")


def _message(status: int | None, output: bytes | bytearray) -> str:
    text = output[-400:].decode(errors="replace").strip() or f"status {status}"
    return "it took too long" if status is None else text


class _Local(_Commands):
    """A process of this machine that runs commands under the kernel's limits, without a network."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = ExitStack()

    async def start(self) -> None:
        command, inside, job = self._folder.enter_context(prepared(_LIMITS))
        await self._launch(command, inside=inside)
        await self._send(job)
        await self._is_ready()

    async def _send(self, request: Mapping[str, object], given: bytes = b"") -> None:
        pipe = cast("asyncio.StreamWriter", cast("Process", self._process).stdin)
        pipe.write(json.dumps(request).encode() + b"\n" + given)
        await pipe.drain()

    async def _run(self, command: Sequence[str], seconds: float, given: bytes, most: int) -> _Outcome:
        process, whole = cast("Process", self._process), False
        answers = cast("asyncio.StreamReader", process.stdout)
        try:
            async with asyncio.timeout(seconds + _GRACE):
                await self._send({"command": command, "seconds": seconds, "given": len(given), "most": most}, given)
                answer = json.loads(await answers.readuntil(b"\n"))
                output = await answers.readexactly(answer["kept"])
            whole = True
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            raise SandboxError(f"the sandbox has ended during {' '.join(command)[:100]!r}") from error
        finally:
            if not whole and process.returncode is None:  # also when cancelled: the answer would be the next one's
                process.terminate()
        return answer["status"], output, answer["size"] - len(output)

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            self._folder.close()


class _OutputTail:
    """What was read of a stream so far: the first line if it is read apart, the end of the rest, and its size."""

    def __init__(self, most: int) -> None:
        self.first, self.kept, self.size = b"", bytearray(), 0
        self._most = most

    async def read(self, stream: asyncio.StreamReader | None, *, apart: bool = False) -> None:
        """Read a stream to its end."""
        reader = cast("asyncio.StreamReader", stream)
        if apart:
            self.first = await reader.readline()
        while part := await reader.read(_READ):
            self.size += len(part)
            self.kept += part
            del self.kept[: max(0, len(self.kept) - self._most)]


class _Container(_Commands):
    """A container without a network, which lives as long as the input of its first process is open."""

    def __init__(self, runtime: str, image: str) -> None:
        super().__init__()
        self._runtime, self._image, self._name = runtime, image, f"meshrl-{secrets.token_hex(8)}"

    async def start(self) -> None:
        runtime, name, image = self._runtime, self._name, self._image
        if runtime == "apptainer":
            own = "/" in image and image.startswith((".", "/"))
            line = 'apptainer instance start --containall --writable-tmpfs --net --network none "$1" "$0"'
            place = image if own or "://" in image else f"docker://{image}"
            whole = f'{line} >&2 && echo ready && cat; apptainer instance stop "$0" >&2'
            await self._launch(["sh", "-c", whole, name, place], [runtime, "instance", "stop", name])
        else:
            options = ["--rm", "--interactive", "--network", "none", "--memory", f"{_LIMITS.memory_mib}m"]
            options += ["--pids-limit", str(_LIMITS.processes), "--name", name, "--entrypoint", "sh"]
            # `exit` keeps a shell from becoming `cat`: it reaps what commands leave.
            held = [runtime, "run", *options, image, "-c", "echo ready; cat; exit"]
            await self._launch(held, [runtime, "rm", "--force", "--volumes", name])
        await self._is_ready()

    def _inside(self, *command: str) -> Sequence[str]:
        if self._runtime == "apptainer":
            # It would pass on this process's environment, and its folder.
            bare = ["--cleanenv", "--pwd", "/tmp"]  # noqa: S108 -- of the container
            return ["apptainer", "exec", *bare, f"instance://{self._name}", *command]
        return [self._runtime, "exec", "--interactive", self._name, *command]

    async def _run(self, command: Sequence[str], seconds: float, given: bytes, most: int) -> _Outcome:
        # The first line is the process to kill: ending the client would leave it running.
        line = self._inside("sh", "-c", 'echo $$; exec "$@" 2>&1', "sh", *command)
        try:
            client = await asyncio.create_subprocess_exec(*line, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno != errno.E2BIG:
                raise
            why = f"{command[0][:100]}: {error}\n".encode(errors="replace")
            return 127, why[:most], max(0, len(why) - most)  # no system runs such a line
        output, errors, in_time = _OutputTail(most), _OutputTail(_READ), False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    heard = output.read(client.stdout, apart=True), errors.read(client.stderr)
                    await asyncio.gather(_write_input(client, given), *heard)
                    await client.wait()
                    in_time = True
        finally:
            if not in_time:  # also when cancelled
                await self._end(client, output.first.decode().strip())
        if not output.first and in_time:
            cause = _message(client.returncode, errors.kept)
            raise SandboxError(f"the sandbox has ended, or cannot run {command[0]!r}: {cause}")
        return client.returncode if in_time else None, bytes(output.kept), output.size - len(output.kept)

    async def _end(self, client: Process, process: str) -> None:
        """End a command, by the number of its process in the container if that is known, and its client."""
        try:
            if process and client.returncode is None:
                await self._kill(process)
        finally:
            with suppress(ProcessLookupError):
                client.kill()
            _read_no_more(client)
            await client.wait()

    async def _kill(self, process: str) -> None:
        line = self._inside("sh", "-c", 'kill -s KILL -- "-$0" "$0"', process)
        killing = await asyncio.create_subprocess_exec(*line, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        try:
            async with asyncio.timeout(_GRACE):
                await killing.wait()
        except TimeoutError as error:
            with suppress(ProcessLookupError):
                killing.kill()
            with suppress(ProcessLookupError):
                cast("Process", self._process).terminate()  # the command may still run
            why = f"{self._runtime} did not kill a command in {_GRACE:g} s"
            raise SandboxError(f"the sandbox is ended: {why}") from error


def _read_no_more(process: Process) -> None:
    """Close the outputs of a process. Its `wait` returns only after that, and a full one is not read to its end."""
    transport = cast("asyncio.SubprocessTransport", vars(process)["_transport"])
    for stream in (1, 2):
        if pipe := transport.get_pipe_transport(stream):
            pipe.close()


async def _write_input(client: Process, given: bytes) -> None:
    """Write a process's input, as far as it reads it."""
    pipe = cast("asyncio.StreamWriter", client.stdin)
    with suppress(ConnectionError):
        pipe.write(given)
        await pipe.drain()
    pipe.close()
