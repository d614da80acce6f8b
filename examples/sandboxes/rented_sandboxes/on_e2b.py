"""`e2b:TEMPLATE`: a sandbox of E2B, https://e2b.dev. The key is in E2B_API_KEY."""

# pyright: reportMissingImports=false

from e2b import AsyncSandbox

from .shell import LIFE, Shell


class E2B(Shell):
    """A sandbox of a template, by name or ID. Without one it has E2B's own."""

    _machine: AsyncSandbox

    def __init__(self, template: str) -> None:
        super().__init__()
        self._template = template or None

    async def _rent(self) -> None:
        self._machine = await AsyncSandbox.create(self._template, timeout=LIFE, allow_internet_access=False)
        self._ending.push_async_callback(self._machine.kill)

    async def _run(self, line: str, seconds: int) -> str:
        ran = await self._machine.commands.run(line, timeout=seconds)
        return str(ran.stdout)

    async def _download(self, path: str) -> bytes:
        return bytes(await self._machine.files.read(path, format="bytes"))

    async def _upload(self, path: str, content: bytes) -> None:
        await self._machine.files.write(path, content)
