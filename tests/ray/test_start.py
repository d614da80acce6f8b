"""What happens while Ray starts."""

import asyncio
import signal
import sys

import pytest
import ray

from meshrl import Mesh, Resources
from meshrl.engines.ray import RayEngine


async def test_sigterm_reaches_the_callers_handler_while_rays_own_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    came: list[int] = []

    def handler(number: int, _: object) -> None:
        came.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    engine = RayEngine()
    try:
        with pytest.raises(asyncio.CancelledError):
            await Mesh.reserve(engine, 1, Resources(cpus=0))
        await engine.close()
        assert came == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
