"""`daytona:SNAPSHOT`: a sandbox of Daytona, https://daytona.io. The key is in DAYTONA_API_KEY."""

# pyright: reportMissingImports=false

import shlex

from daytona import AsyncDaytona, AsyncSandbox, CreateSandboxFromSnapshotParams

from .shell import LIFE, START, Shell


class Daytona(Shell):
    """A sandbox of a snapshot, by name. Without one it has Daytona's own."""

    _machine: AsyncSandbox

    def __init__(self, snapshot: str) -> None:
        super().__init__()
        self._snapshot = snapshot or None

    async def _rent(self) -> None:
        asked = CreateSandboxFromSnapshotParams(
            snapshot=self._snapshot,
            network_block_all=True,
            auto_stop_interval=0,  # a model may take long between two commands
            ttl_minutes=LIFE // 60,
        )
        client = AsyncDaytona()
        self._ending.push_async_callback(client.close)
        self._machine = await client.create(asked, timeout=START)
        self._ending.push_async_callback(self._machine.delete)

    async def _run(self, line: str, seconds: int) -> str:
        ran = await self._machine.process.exec(f"sh -c {shlex.quote(line)}", timeout=seconds)  # its own may be zsh
        return str(ran.result)

    async def _download(self, path: str) -> bytes:
        return bytes(await self._machine.fs.download_file(path) or b"")

    async def _upload(self, path: str, content: bytes) -> None:
        await self._machine.fs.upload_file(content, path)
