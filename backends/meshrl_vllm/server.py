"""vLLM's server, in its own process. It answers like OpenAI's servers."""

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from meshrl.errors import ConfigError, ModelError
from meshrl.roles import Server, ServerConfig, options_of
from meshrl_inference.options import check_here
from meshrl_inference.process import environment, new_folder
from meshrl_vllm.guard import HEADER
from meshrl_vllm.options import VllmConfig

_PATIENCE: Final = 600.0
"""Seconds that the server has to start, and to answer a request."""
_GRACE: Final = 10.0
"""Seconds that it has to end by itself."""
_LINES: Final = 20
"""Lines of its output in an error."""
_OWN: Final = ("127.0.0.1", "localhost", "::1")
"""Names by which only this machine reaches itself."""


class VllmServer(Server):
    """Completions, and chats if the tokenizer has a template, under the run's name."""

    def __init__(self, config: ServerConfig) -> None:
        """ConfigError if the address cannot be used, BackendError if vLLM is neither here nor named."""
        _check_address(config)
        if config.python is None:
            check_here("vllm", "--python")
        self._config = config
        self._key = secrets.token_urlsafe(32)
        self._folder = new_folder("vllm")
        self._log = Path(self._folder.name, "log")
        variables = environment(Path(self._folder.name), "vllm")
        variables.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        options = {
            "--model": config.model,
            "--dtype": config.dtype,
            "--served-model-name": config.name,
            "--host": config.host,
        }
        if config.follow:
            variables["VLLM_SERVER_DEV_MODE"] = "1"  # adds the endpoints for new weights
            options["--weight-transfer-config"] = '{"backend": "meshrl"}'
            options["--worker-extension-cls"] = "meshrl_vllm.transfer.Extension"
            options["--middleware"] = "meshrl_vllm.guard.Guard"
        own = options_of(config, VllmConfig)
        if own.kv_cache_mib is not None:
            options["--kv-cache-memory-bytes"] = str(own.kv_cache_mib << 20)
        words = [word for option in options.items() for word in option]
        command = [config.python or sys.executable, "-m", "meshrl_vllm.launch"]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 -- the interpreter that the user names
                    [*command, *words, "--port", str(config.port)],
                    stdin=subprocess.PIPE,  # it ends with this process in any case
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this process
                    env=variables,
                )
        except OSError as error:
            self._folder.cleanup()
            raise ModelError(f"vLLM's server cannot be started: {error}. Give --python an interpreter of an "
                             "environment that has vLLM") from error  # fmt: skip
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and `check` says how
                self._process.stdin.write(f"{self._key}\n".encode())
                self._process.stdin.flush()

    async def started(self) -> str:
        """Wait until it answers, and return a shell command that sends a request. ModelError if it does not start."""
        until = time.monotonic() + _PATIENCE
        while not await asyncio.to_thread(self._answers):
            self.check()
            if time.monotonic() > until:
                raise self._error(f"has not started in {_PATIENCE:.0f} seconds")
            await asyncio.sleep(0.2)
        if self._config.follow:
            await self._post("init_weight_transfer_engine", init_info={})
        return self._example()

    def check(self) -> None:
        """Raise ModelError if the process has ended."""
        code = self._process.poll()
        if code is None:
            return
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        raise self._error(f"has ended ({how})")

    async def load(self, folder: str, version: str) -> None:
        """Load the weights of a folder between two steps. Running requests continue, and read their tokens again."""
        await self._post("pause?mode=keep")
        await self._post("start_weight_update")
        await self._post("collective_rpc", method="take_folder", args=[folder])
        await self._post("finish_weight_update", weight_version=version)
        await self._post("reset_prefix_cache?reset_running_requests=true")
        await self._post("resume")

    def close(self) -> None:
        """End the process and its children."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        self._folder.cleanup()

    @property
    def _host(self) -> str:
        """The host name for requests from here."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)  # noqa: S104 -- a key

    def _error(self, what: str) -> ModelError:
        lines = self._log.read_text(errors="replace").splitlines()[-_LINES:]
        return ModelError(
            f"vLLM's server {what}: give --python an interpreter of an environment that has vLLM, or mend what its "
            "last lines say:\n" + "\n".join(f"  {line}" for line in lines)
        )

    def _answers(self) -> bool:
        try:
            return self._request("GET", "health")[0] == http.HTTPStatus.OK
        except OSError:
            return False

    async def _post(self, path: str, **body: object) -> None:
        try:
            status, text = await asyncio.to_thread(self._request, "POST", path, json.dumps(body) if body else None)
        except (OSError, http.client.HTTPException) as error:
            self.check()
            raise ModelError(f"vLLM's server does not answer: {type(error).__name__}: {error}") from error
        if status != http.HTTPStatus.OK:
            raise ModelError(f"vLLM's server has refused /{path}: {status}: {text}")

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._host, self._config.port, timeout=_PATIENCE)
        try:
            headers = {HEADER: self._key} | ({"Content-Type": "application/json"} if body else {})
            connection.request(method, f"/{path}", body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def _example(self) -> str:
        config = self._config
        prompt: dict[str, object] = {"prompt": config.prompt}
        if config.chat:
            prompt = {"messages": [{"role": "user", "content": config.prompt}]}
            if variables := config.chat_template_kwargs:
                prompt["chat_template_kwargs"] = variables
        body = json.dumps({"model": config.name, **prompt, "max_tokens": config.max_tokens}, ensure_ascii=False)
        address = config.model_copy(update={"host": self._host}).url
        path = "chat/completions" if config.chat else "completions"
        return f"curl {address}/v1/{path} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def _check_address(config: ServerConfig) -> None:
    """Raise ConfigError if nothing can listen there, or others would reach the endpoints for new weights."""
    if config.follow and config.host not in _OWN:
        raise ConfigError(
            f"--follow with --host {config.host}: anybody who reaches a server that takes new weights can change "
            f"them. Follow on {_OWN[0]}, and let a proxy or a tunnel forward only /v1"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise ConfigError(
            f"--host {config.host} --port {config.port}: cannot be used: {error.strerror}. Choose another"
        ) from error
