"""Serve what a run has trained: its newest model and, with `follow`, each newer one."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from meshrl import log
from meshrl.config import Table, load_toml, validate
from meshrl.errors import BackendError, ModelError
from meshrl.observe import table_of
from meshrl.roles import (
    Address,
    PolicyConfig,
    Server,
    ServerConfig,
    backends_with,
    implementation,
)
from meshrl.run.artifacts import newest, newest_folder, newest_source, sample_prompt

_LOOKS: Final = 1.0
"""Seconds between two checks of the run's folder."""


async def serve(run: Path, address: Address, say: Callable[[str], None]) -> None:
    """Serve the newest model of a run, whose folder is absolute, until this is cancelled.

    Raises ConfigError if the run has no model, and the errors of its policy and the server.
    """
    table = load_toml(run / "config.toml")
    policy = validate(PolicyConfig, table_of(table, "policy"), run / "config.toml")
    with tempfile.TemporaryDirectory(prefix="meshrl-serve-") as scratch:
        source, folder = await newest_source(run, policy, Path(scratch))
        config, python = _server_config(run, table, policy, folder, address)
        # A run's folder is data, and may come from anybody. The interpreter that it names runs only if the user names
        # it.
        unused = f"{run / 'config.toml'} names the interpreter {python}, which is not run without --python {python}"
        other = python is not None and address.python is None
        if other:
            log.info(f"the server runs in this environment: {unused}")
        server = implementation(Server, config.backend)(config)
        try:
            say(f"{source.path} is loaded")
            try:
                say(f"{address.url} answers: try\n{await server.started()}")
            except ModelError as error:
                raise (ModelError(f"{error}\n{unused}") if other else error) from error.__cause__
            while True:
                await asyncio.sleep(_LOOKS)
                server.check()
                if not address.follow or newest(run) == source:
                    continue
                if found := await newest_folder(run, policy, Path(scratch)):
                    source, folder = found
                    await server.load(str(folder), source.path.name)
                    say(f"{source.path} is served")
        finally:
            server.close()


def _server_config(
    run: Path, table: Table, policy: PolicyConfig, folder: Path, address: Address
) -> tuple[ServerConfig, object]:
    """Return the server's configuration, and the interpreter of the run's sampler."""
    sampler = table_of(table, "sampler")
    most = table_of(table, "sampling").get("max_tokens")
    backend = _server(str(sampler.get("backend")))
    told = {
        **address.model_dump(),
        "backend": backend,
        "model": str(folder),
        "name": run.name,
        "dtype": policy.dtype,
        "prompt": sample_prompt(run, policy.model),
        "chat": bool(sampler.get("chat", policy.chat)),
        "chat_template_kwargs": sampler.get("chat_template_kwargs", policy.chat_template_kwargs),
        "max_tokens": most if isinstance(most, int) else 16,
    }
    # A server runs like its backend's sampler, except for the interpreter.
    own = table_of(sampler, backend)
    python = own.pop("python", None)
    return validate(ServerConfig, told | ({backend: own} if own else {}), run / "config.toml"), python


def _server(sampler: str) -> str:
    """Return the backend that serves: the sampler's, or one that can."""
    able = backends_with("Server")
    if not able:
        raise BackendError("no installed backend can serve a model: install one with the role Server")
    return sampler if sampler in able else able[0]
