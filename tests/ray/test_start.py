"""What happens while Ray starts."""

import asyncio
import signal
import sys

import pytest
import ray

from meshrl import Mesh, Resources
from meshrl.engines.ray import RayEngine
from meshrl.engines.ray.cluster import host_and_port
from meshrl.errors import ConfigError


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


def test_a_host_that_is_an_ipv6_address_has_brackets_only_in_the_address_of_the_cluster() -> None:
    assert host_and_port("[fd00::1]:6379") == ("fd00::1", 6379)
    assert host_and_port("10.0.0.2:6379") == ("10.0.0.2", 6379)


async def test_a_ray_that_does_not_start_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    engine = RayEngine()
    with pytest.raises(
        ConfigError, match=r"did not start .* within 0 s: The current node timed out .*`ray start --head`"
    ):
        await Mesh.reserve(engine, 1, Resources(cpus=0))
    await engine.close()
