"""The server's life: its roles, its socket, and how it begins again after a machine has failed."""

import asyncio
import math
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Final, cast

import uvicorn

from meshrl import log
from meshrl.errors import ConfigError, MeshrlError, described
from meshrl.http_server import HttpServer, listen
from meshrl.roles import Policy, Sampler
from meshrl.run import Run, is_machine_fault
from meshrl.tinker.app import Api
from meshrl.tinker.config import ServedConfig
from meshrl.tinker.models import models_of, tables_of
from meshrl.tinker.queues import Room
from meshrl.tinker.samples import Desk
from meshrl.tinker.service import Service

_UNBOUNDED: Final = 2**31
_IDLE: Final = 600.0
"""Seconds for which a connection may be idle. A client that finds it closed when it sends must send again."""


@asynccontextmanager
async def serving(config: ServedConfig) -> AsyncGenerator[tuple[str, "asyncio.Task[None]"]]:
    """Serve during the block. Yields the base URL, and a task that ends only with an error that ends the server.

    Raises ConfigError if the address is taken, or if others can reach it and there are no tenants.
    """
    tinker = config.tinker
    if not tinker.tenants and not _is_loopback(tinker.host):
        raise ConfigError(
            f"tinker.host = {tinker.host!r} can be reached by others, and without tinker.tenants every key is let in: "
            "add a tenant, or listen on 127.0.0.1"
        )
    with (
        listen(tinker.host, tinker.port, "set another tinker.port") as listening,
        tempfile.TemporaryDirectory(prefix="meshrl-") as scratch,
    ):
        host, port = listening.getsockname()[:2]
        async with Run(config.run, _told(config)) as run:
            tables, sampler_table = tables_of(config)
            policy = await run.spawn(Policy, tables.policy)
            sampler = await run.spawn(Sampler, sampler_table)
            models = await models_of(policy, sampler, config, Path(scratch, "initial"))
            share = 0.5 if len(tinker.tenants) > 1 else 1.0  # so that no one alone takes all
            room = Room(tinker.requests, tinker.waiting_mib << 20, lambda name: _most_requests(config, name), share)
            service = Service(config, models, Path(tinker.folder), room)
            desk = Desk(models, service.weights_folder, config.sampler.slots)
            api = Api(service, desk, room)
            options = uvicorn.Config(
                api.app,
                log_level="error",
                lifespan="off",
                timeout_keep_alive=math.ceil(_IDLE),
                timeout_graceful_shutdown=1,
                ws="none",
            )
            server = HttpServer(options)
            work, http = asyncio.create_task(_working(service, desk)), asyncio.create_task(server.serve([listening]))
            try:
                yield f"http://{f'[{host}]' if ':' in host else host}:{port}", work
            finally:
                server.should_exit = True
                work.cancel()
                await asyncio.wait([work])  # an error of it was raised in the block
                await desk.close()
                await http
                service.close()


async def serve(config: ServedConfig, tell: Callable[[str], None]) -> None:
    """Serve until this is cancelled. `tell`: gets a line for people, with the URL.

    While `run.restarts` are left, a machine's fault begins the server again: clients notice a pause.
    """
    left = config.run.restarts
    while True:
        try:
            async with serving(config) as (url, work):
                tell(f"{config.model} is served at {url}: export TINKER_BASE_URL={url} TINKER_API_KEY=tml-KEY")
                await work
        except (MeshrlError, ExceptionGroup) as error:
            if not (left and is_machine_fault(error)):
                raise
            left -= 1
            log.warning("a machine failed: the server begins again", error=described(error), left=left)


async def _working(service: Service, desk: Desk) -> None:
    """Apply requests until this is cancelled. Raises what ends the trainer or the sampler."""
    tasks = [asyncio.create_task(service.run()), asyncio.create_task(desk.watch())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


def _told(config: ServedConfig) -> dict[str, object]:
    """Return the configuration as the run's folder tells it: without what keys could be guessed from."""
    table: dict[str, object] = config.model_dump(mode="json", exclude={"tinker": {"tenants": True}})
    quotas = {name: each.model_dump(exclude={"key_sha256"}) for name, each in config.tinker.tenants.items()}
    cast("dict[str, object]", table["tinker"])["tenants"] = quotas
    return table


def _most_requests(config: ServedConfig, tenant: str) -> int:
    quota = config.tinker.tenants.get(tenant)
    return quota.requests if quota else _UNBOUNDED


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
