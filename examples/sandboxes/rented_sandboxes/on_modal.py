"""`modal:IMAGE`: a sandbox of Modal, https://modal.com. The keys are in MODAL_TOKEN_ID and MODAL_TOKEN_SECRET."""

# pyright: reportMissingImports=false

from modal import App, Image, Sandbox

from .shell import LIFE, Shell


class Modal(Shell):
    """A sandbox of an image of a registry, such as python:3.12-slim. Without one it has Modal's own."""

    _machine: Sandbox

    def __init__(self, image: str) -> None:
        super().__init__()
        self._image = Image.from_registry(image) if image else Image.debian_slim()

    async def _rent(self) -> None:
        app = await App.lookup.aio("meshrl", create_if_missing=True)
        self._machine = await Sandbox.create.aio(
            "sleep", "infinity", app=app, image=self._image, timeout=LIFE, block_network=True
        )
        self._ending.push_async_callback(self._machine.detach.aio)
        self._ending.push_async_callback(self._machine.terminate.aio)

    async def _run(self, line: str, seconds: int) -> str:
        process = await self._machine.exec.aio("sh", "-c", line, timeout=seconds)
        return str(await process.stdout.read.aio())

    async def _download(self, path: str) -> bytes:
        return bytes(await self._machine.filesystem.read_bytes.aio(path))

    async def _upload(self, path: str, content: bytes) -> None:
        await self._machine.filesystem.write_bytes.aio(content, path)
