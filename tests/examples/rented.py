"""Stands for the packages e2b, modal and daytona: a machine is a folder of this one, and each call is noted."""

import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

from tests.contracts.contracts import Given

Call: TypeAlias = Callable[..., Awaitable[object]]


class Service:
    """A service with one machine, and what was asked of it."""

    def __init__(self, home: Path) -> None:
        self.calls: dict[str, Given] = {}
        self.path = "/usr/bin:/bin"
        """Where the machine has its tools."""
        self.down = ""
        """Why nothing works."""
        self.open: list[str] = []
        """The machines and clients that have not ended."""
        self._home = home

    def note(self, target: str, given: tuple[object, ...], keywords: dict[str, object]) -> None:
        self.calls[target] = Given(len(given), [*keywords] or ())

    def fake(self, target: str, act: Callable[..., object]) -> Call:
        async def call(*given: object, **keywords: object) -> object:
            self.note(target, given, keywords)
            if self.down and not target.endswith((".kill", ".terminate", ".detach", ".delete", ".close")):
                raise RuntimeError(self.down)
            return act(*given, **keywords)

        return call

    def ends(self, name: str) -> Callable[[], None]:
        return lambda: self.open.remove(name)

    def rent(self, image: str | None, machine: SimpleNamespace) -> SimpleNamespace:
        assert image in ("small", None)
        self.open.append("a machine")
        return machine

    def run(self, *command: str) -> str:
        told = subprocess.run(command, cwd=self._home, env={"PATH": self.path}, capture_output=True, check=True)
        return told.stdout.decode("ascii")

    def read(self, path: str) -> bytes:
        assert path.startswith("/")
        return Path(path).read_bytes()

    def write(self, path: str, content: bytes) -> None:
        assert path.startswith("/")
        Path(path).write_bytes(content)


def e2b(service: Service) -> SimpleNamespace:
    own = "e2b.sandbox_async"

    def run(line: str, timeout: float) -> object:
        assert timeout > 1
        return SimpleNamespace(stdout=service.run("/bin/bash", "-c", line))

    def create(template: str | None, timeout: int, allow_internet_access: bool) -> object:
        assert (timeout, allow_internet_access) == (3600, False)
        return service.rent(template, machine)

    machine = SimpleNamespace(
        commands=SimpleNamespace(run=service.fake(f"{own}.commands.command.Commands.run", run)),
        files=SimpleNamespace(
            read=service.fake(
                f"{own}.filesystem.filesystem.Filesystem.read", lambda path, **_: bytearray(service.read(path))
            ),
            write=service.fake(f"{own}.filesystem.filesystem.Filesystem.write", service.write),
        ),
        kill=service.fake("e2b.AsyncSandbox.kill", service.ends("a machine")),
    )
    return SimpleNamespace(AsyncSandbox=SimpleNamespace(create=service.fake("e2b.AsyncSandbox.create", create)))


def modal(service: Service) -> SimpleNamespace:
    files, own = "modal.sandbox._filesystem._SandboxFilesystem", "modal.sandbox._sandbox._Sandbox"

    def fake(target: str, act: Callable[..., object]) -> SimpleNamespace:
        return SimpleNamespace(aio=service.fake(target, act))

    def run(*command: str, timeout: int) -> object:
        assert sum(map(len, command)) <= 2**16, "the package refuses more"
        assert isinstance(timeout, int)
        printed = service.run(*command)
        return SimpleNamespace(
            stdout=SimpleNamespace(read=fake("modal.io_streams._StreamReader.read", lambda: printed))
        )

    def create(*command: str, app: str, image: str | None, timeout: int, block_network: bool) -> object:
        assert (*command, app, timeout, block_network) == ("sleep", "infinity", "the app", 3600, True)
        return service.rent(image, machine)

    def image(tag: str) -> str:
        service.note("modal._image._Image.from_registry", (tag,), {})
        return tag

    def own_image() -> None:
        service.note("modal._image._Image.debian_slim", (), {})

    machine = SimpleNamespace(
        exec=fake(f"{own}.exec", run),
        filesystem=SimpleNamespace(
            read_bytes=fake(f"{files}.read_bytes", service.read),
            write_bytes=fake(f"{files}.write_bytes", lambda content, path: service.write(path, content)),
        ),
        terminate=fake(f"{own}.terminate", service.ends("a machine")),
        detach=fake(f"{own}.detach", lambda: None),
    )
    return SimpleNamespace(
        App=SimpleNamespace(lookup=fake("modal.app._App.lookup", lambda name, create_if_missing: "the app")),
        Image=SimpleNamespace(from_registry=image, debian_slim=own_image),
        Sandbox=SimpleNamespace(create=fake(f"{own}.create", create)),
    )


def daytona(service: Service) -> SimpleNamespace:
    files, own = "daytona._async.filesystem.AsyncFileSystem", "daytona._async.process.AsyncProcess"

    def run(line: str, timeout: int) -> object:
        assert isinstance(timeout, int)
        return SimpleNamespace(result=service.run("/bin/bash", "-c", line))

    def create(asked: dict[str, Any], timeout: float) -> object:
        assert 0 < timeout < 300
        assert (asked["network_block_all"], asked["auto_stop_interval"], asked["ttl_minutes"]) == (True, 0, 60)
        return service.rent(asked["snapshot"], machine)

    def parameters(**asked: object) -> object:
        service.note("daytona.CreateSandboxFromSnapshotParams", (), asked)
        return asked

    def client() -> object:
        service.note("daytona.AsyncDaytona", (), {})
        service.open.append("the client")
        return SimpleNamespace(
            create=service.fake("daytona.AsyncDaytona.create", create),
            close=service.fake("daytona.AsyncDaytona.close", service.ends("the client")),
        )

    machine = SimpleNamespace(
        process=SimpleNamespace(exec=service.fake(f"{own}.exec", run)),
        fs=SimpleNamespace(
            download_file=service.fake(f"{files}.download_file", service.read),
            upload_file=service.fake(f"{files}.upload_file", lambda content, path: service.write(path, content)),
        ),
        delete=service.fake("daytona.AsyncSandbox.delete", service.ends("a machine")),
    )
    return SimpleNamespace(
        AsyncDaytona=client, AsyncSandbox=SimpleNamespace(), CreateSandboxFromSnapshotParams=parameters
    )


PACKAGES: Final = {"e2b": e2b, "modal": modal, "daytona": daytona}
