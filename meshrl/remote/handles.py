"""A policy and a sampler on a server, for scripts that need not know where theirs are."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from meshrl.algo import Loss
from meshrl.data import ADAPTER, Batch, LossResult, Metrics, Weights
from meshrl.errors import DataError, MeshrlError, ModelError
from meshrl.remote.client import Client, RequestExpired
from meshrl.remote.messages import Call, Generate, Made, Named, Packed, Verb
from meshrl.roles import Policy, PolicyConfig, Sampler, Sampling, Step, places_of

_PATIENCE: Final = 300.0
"""Seconds without an answer after which a request fails."""
_SIGN: Final = 60.0
"""Seconds between two signs that the client is here."""
_READ: Final = ("prompt", "tokens", "loss_mask", "sampler_logprobs", "versions", "observation", "max_tokens")
"""Columns that a sampler reads."""
_PLACE: Final = "asked_row"
_STATE: Final = "server.json"
_CALL: Final = "meshrl/call"


class Remote:
    """A session at a server: what `connect` yields."""

    def __init__(self, client: Client, session: str, model: str) -> None:
        self.client: Final = client
        self.session: Final = session
        self.model: Final = model
        """The name of the server's model."""
        self._models = count()

    async def policy(self, config: PolicyConfig | None = None) -> "RemotePolicy":
        """Make a new model in training.

        The table's `lora` and `seed` give rank and seed of its adapter, if the server trains adapters. How it steps is
        in the server's table, and in the `Step` of a call.
        """
        lora = config.lora if config else None
        given: dict[str, object] = {"session_id": self.session, "model_seq_id": next(self._models)}
        if config is not None and lora is not None:
            seed = config.seed if lora.seed is None else lora.seed
            given["lora_config"] = {"rank": lora.rank, "seed": seed}
        made = await self.client.json("create_model", {**given, "base_model": self.model})
        await self.client.result_of(str(made["request_id"]))
        return RemotePolicy(self, str(made["model_id"]))

    def sampler(self) -> "RemoteSampler":
        """Return a sampler of the server's model. It draws from the weights that were published to it last."""
        return RemoteSampler(self)


@asynccontextmanager
async def connect(url: str, key: str = "tml-local", patience: float = _PATIENCE) -> AsyncGenerator[Remote]:
    """Open a session at a server that `meshrl tinker` runs, for the block.

        async with rl.connect("http://127.0.0.1:8000") as server:
            policy, sampler = await server.policy(), server.sampler()
            await rl.publish(policy, sampler)

    `key`: the tenant's. `patience`: seconds without an answer after which a request fails. ConfigError for a URL that
    is none, DataError for what the server refuses, ModelError if it fails or does not answer.
    """
    client = Client(url, key, patience)
    known = await client.json("get_server_capabilities")
    (served,) = msgspec.convert(known["supported_models"], list[dict[str, object]])
    session = str((await client.json("create_session", {"tags": ["meshrl"]}))["session_id"])

    async def sign() -> None:
        while True:
            await asyncio.sleep(_SIGN)
            await client.json("session_heartbeat", {"session_id": session})

    signs = asyncio.create_task(sign())
    how = "error"
    try:
        yield Remote(client, session, str(served["model_name"]))
        how = "success"
    finally:
        signs.cancel()
        await asyncio.gather(signs, return_exceptions=True)
        with suppress(MeshrlError):  # the server may have ended, and lets go of silent sessions
            await client.once().json(f"sessions/{session}/finish", {"reason": {"type": how}})


class RemotePolicy(Policy):
    """A model in training at a server. Each call is one request, which the server applies once."""

    def __init__(self, server: Remote, model: str) -> None:
        self._client = server.client
        self.model: str = model
        self._numbers = count(1)
        self._missing: set[int] = set()
        """Numbers of calls that the server has not taken. It makes none of the later ones before it has these."""
        self._submitting: set[asyncio.Task[str]] = set()

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """Make one optimizer step on the whole batch."""
        return (await self._call("update", batch, loss)).metrics

    async def forward_backward(self, batch: Batch, loss: Loss) -> LossResult:
        """Add the gradients of a batch."""
        made = await self._call("forward_backward", batch, loss)
        return LossResult(_batch_of(made), made.metrics)

    async def step(self, optimizer: Step | None = None, adapter: str | None = None) -> Metrics:
        """Make one optimizer step with all gradients since the last one."""
        _check_none(adapter)
        return (await self._call("step", step=optimizer)).metrics

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `logprobs`."""
        made = _batch_of(await self._call("logprobs", batch))
        return batch.assign(logprobs=made.ragged("logprobs"))

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask`."""
        batch = await _own_rows(batch).load()
        made = await self._made(Call(self.model, 0, "encode", Packed.of(batch)))
        return batch.assign(**_batch_of(made).columns)

    async def weights(self, adapter: str | None = None) -> Weights:
        """Keep the weights at the server. They have one empty tensor here, whose name is their path there."""
        _check_none(adapter)
        made = await self._call("weights")
        return Weights(made.version, {made.path: np.zeros(0, np.float32)})

    async def save(self, folder: str, adapter: str | None = None) -> None:
        """Fetch the files that other libraries read: a Hugging Face folder, or an adapter like peft's."""
        _check_none(adapter)
        name = f"saved-{secrets.token_hex(8)}"
        path = (await self._ask("save_weights_external", path=name)).path
        where = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
        try:
            listed = await self._client.json(f"training_runs/{where}/external_weights_urls")
            links = msgspec.convert(listed["urls"], dict[str, str])
            with _written(Path(folder)) as part:
                for file, url in links.items():
                    (part / Path(file).name).write_bytes((await self._client.ask(url, None))[0])
        finally:
            with suppress(MeshrlError):  # what is left there costs room alone
                await self._client.once().ask(f"/api/v1/training_runs/{where}", None, method="DELETE")

    async def checkpoint(self, folder: str, wait: bool = True, adapter: str | None = None) -> None:
        """Keep the whole state at the server, and its path in the folder."""
        _check_none(adapter)
        path = (await self._ask("save_weights", path=f"state-{secrets.token_hex(8)}")).path
        with _written(Path(folder)) as part:
            (part / _STATE).write_bytes(msgspec.json.encode({"path": path}))

    async def restore(self, folder: str, adapter: str | None = None, optimizer: bool = True) -> None:
        """Load what `checkpoint` kept at this server. ModelError for a folder of another policy."""
        _check_none(adapter)
        await self._ask("load_weights", path=_path_in(Path(folder, _STATE)), optimizer=optimizer)

    async def _ask(self, verb: str, **keys: object) -> Made:
        def submit(number: int) -> Coroutine[None, None, str]:
            body = msgspec.json.encode({"model_id": self.model, "seq_id": number, **keys})
            return self._client.submit(verb, body, "application/json")

        return await self._numbered(submit)

    async def _call(
        self, verb: Verb, batch: Batch | None = None, loss: Loss | None = None, step: Step | None = None
    ) -> Made:
        packed = None
        if batch is not None:
            batch = await _own_rows(batch).load()
            packed = Packed.of(batch.only(*(name for name in batch.names if not isinstance(batch[name], tuple))))
        named = None if loss is None else Named.of(loss)
        values = None if step is None else step.model_dump(exclude_none=True)
        return await self._made(Call(self.model, 0, verb, packed, named, values))

    async def _made(self, call: Call) -> Made:
        def submit(number: int) -> Coroutine[None, None, str]:
            numbered = msgspec.structs.replace(call, seq_id=number)
            return self._client.submit(_CALL, msgspec.msgpack.encode(numbered))

        return await self._numbered(submit)

    async def _numbered(self, submit: Callable[[int], Coroutine[None, None, str]]) -> Made:
        """Make a call under the next number, which reaches the server even if the call is cancelled."""
        for number in sorted(self._missing):
            await self._fill(self._client, number)
        task = asyncio.create_task(self._taken(submit, next(self._numbers)))
        self._submitting.add(task)
        task.add_done_callback(self._submitting.discard)
        return await self._client.result_of(await asyncio.shield(task))

    async def _taken(self, submit: Callable[[int], Coroutine[None, None, str]], number: int) -> str:
        try:
            return await submit(number)
        except Exception:
            self._missing.add(number)
            with suppress(ModelError):  # then the next call does it
                await self._fill(self._client.once(), number)
            raise

    async def _fill(self, client: Client, number: int) -> None:
        """Give a number to a call without rows, which the server refuses, and then makes the later ones."""
        with suppress(DataError):  # the call has come after all
            await client.submit(_CALL, msgspec.msgpack.encode(Call(self.model, number, "logprobs")))
        self._missing.discard(number)


class RemoteSampler(Sampler):
    """The sampler of a server. A call's rows all come at its end, and keep the weights with which it began."""

    def __init__(self, server: Remote) -> None:
        self._client = server.client
        self._session = server.session
        self._path: str | None = None
        self._calls, self._loads = 0, 0

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield all rows, in the order in which the server finished them."""
        if not sampling.beside:
            self._calls += 1
        prompts = await _own_rows(prompts).load()
        read = prompts.only(*(name for name in _READ if name in prompts))
        request = Generate(
            f"{self._session}:generate:{secrets.token_hex(12)}",
            self._path,
            Packed.of(read.assign(**{_PLACE: np.arange(len(prompts))})),
            sampling.model_dump(mode="json"),
            sampling.beside,
            sampling.joins,
        )
        rows = _batch_of(await self._generated(msgspec.msgpack.encode(request)))
        made = rows.drop(*(name for name in (*read.names, _PLACE) if name in rows and name not in _DRAWN))
        yield prompts.select(rows.row(_PLACE)).assign(**made.columns)

    async def _generated(self, request: bytes) -> Made:
        """Return the rows of a call, which a server that began again, or had no room for them, draws again."""
        while True:
            with suppress(RequestExpired):
                return await self._client.result("meshrl/generate", request)

    async def load(self, weights: Weights) -> Batch:
        """Draw from these weights from the next call on. ModelError if they are not of a policy at a server."""
        names = list(weights.tensors)
        if len(names) != 1 or not names[0].startswith("tinker://"):
            raise ModelError(
                f"weights of version {weights.version} were not loaded, because they are not of a policy at this "
                "server: publish from the policy that `connect` gave"
            )
        self._path = names[0]
        self._loads += 1
        return places_of({self._calls: -1}, self._loads - 1)

    async def replay(self, record: Batch) -> None:
        """Raise DataError: other clients of the server draw between these calls."""
        raise DataError(f"a sampler at a server cannot repeat {len(record)} places of a record: leave run.server out")

    async def abort(self) -> None:
        """Raise DataError: a server ends no calls with their rows as they are."""
        raise DataError('a sampler at a server cannot return unfinished rows: take swap = "drain" or "in_flight"')


_DRAWN: Final = ("tokens", "loss_mask", "sampler_logprobs", "versions")
"""Columns that a sampler reads and writes."""


@contextmanager
def _written(folder: Path) -> Generator[Path]:
    """Yield a folder to write to, which replaces this one at the end of the block."""
    part = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}")
    part.mkdir(parents=True)
    try:
        yield part
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _path_in(file: Path) -> str:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, str])["path"]
    except (FileNotFoundError, KeyError, msgspec.DecodeError) as error:
        raise ModelError(f"{file.parent} has no state of a policy at a server: {error}") from error


def _batch_of(made: Made) -> Batch:
    if made.batch is None:
        raise ModelError("the server has sent no rows: it is of another version of meshrl")
    return made.batch.batch()


def _own_rows(batch: Batch) -> Batch:
    if ADAPTER in batch:
        raise DataError(f"rows name adapters in their column {ADAPTER!r}, and a policy at a server has none: drop it")
    return batch


def _check_none(adapter: str | None) -> None:
    if adapter is not None:
        raise DataError(f"a policy at a server has no adapter {adapter!r}: make another policy by server.policy()")
