"""The API over HTTP: its paths, its keys, and its errors.

Each path is a method of `Api`. A request that has a number is refused by its result, not by a status, because the
requests after it wait for it.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, cast
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from meshrl.errors import DataError, MeshrlError
from meshrl.remote import Call, Generate
from meshrl.tinker import library, listings
from meshrl.tinker.asks import (
    AtPath,
    Finish,
    NewSampler,
    NewSession,
    Number,
    OfModel,
    OfSampler,
    OfSession,
    Retrieve,
    Search,
    Ttl,
)
from meshrl.tinker.bodies import TooLarge, read_body
from meshrl.tinker.library import Checkpoint, Model, Session
from meshrl.tinker.queues import Busy, Room
from meshrl.tinker.requests import (
    Create,
    Load,
    OptimStep,
    Pass,
    Refused,
    Sample,
    Save,
    SaveExternal,
    SaveForSampler,
    number_of,
    pass_of_json,
    pass_of_wire,
    read_json,
    read_packed,
)
from meshrl.tinker.results import JSON, PROTOBUF, Failure, Result, reply
from meshrl.tinker.samples import Desk, Kept
from meshrl.tinker.service import Service, Unknown

T = TypeVar("T")
Numbered: TypeAlias = OptimStep | Save | SaveForSampler | SaveExternal | Load

_WAIT: Final = 20.0
"""Seconds that a client waits for a result before it has to ask again. The SDK waits 45."""
_INLINE: Final = 4 << 20
"""Size in bytes of the largest result that is sent before the client has made room for it."""
_LINKS: Final = 3600
"""Seconds for which a link to a file of a checkpoint is valid."""
_LEFT: Final = 499
"""Status of an answer whose client has disconnected."""


class Api:
    """The paths of the API."""

    def __init__(self, service: Service, desk: Desk, room: Room) -> None:
        self._service, self._desk, self._room = service, desk, room
        config = service.config.tinker
        self._keys = {each.key_sha256: name for name, each in config.tenants.items()}
        self._secret = secrets.token_bytes(32)
        self._samples, self._clones = Kept(int(config.samples_mib * 2**20), room), Counter[str]()
        posts: Mapping[str, Callable[[str, Request], Awaitable[Response]]] = {
            "retrieve_future": self._retrieve,  # a path is looked for from the first on
            "asample": self._sample,
            "forward_backward": self._pass,
            "forward": self._pass,
            "optim_step": self._numbered(OptimStep),
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/search": self._search_sessions,
            "sessions/{session}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload,
            "save_weights": self._numbered(Save),
            "save_weights_for_sampler": self._numbered(SaveForSampler),
            "save_weights_external": self._numbered(SaveExternal),
            "load_weights": self._load,
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join_sampler,
            "meshrl/call": self._call,
            "meshrl/generate": self._generate,
            "cancel_future": self._cancel,
            "weights_info": self._weights_info,
            "training_runs/{model}/checkpoints/{kind}/{name}/publish": self._publish,
        }
        gets: Mapping[str, Callable[[str, Request], Awaitable[Response]]] = {
            "get_server_capabilities": self._capabilities,
            "sessions": self._sessions,
            "sessions/{session}": self._session,
            "samplers/{sampler}": self._sampler,
            "training_runs": self._runs,
            "training_runs/{model}": self._run,
            "training_runs/{model}/checkpoints": self._checkpoints,
            "training_runs/{model}/checkpoints/{kind}/{name}/external_weights_urls": self._links,
            "checkpoints": self._checkpoints,
            "billing/usage/checkpoints/current": self._storage,
        }
        checkpoint = "/api/v1/training_runs/{model}/checkpoints/{kind}/{name}"
        self.app: Final = Starlette(
            routes=[
                *(Route(f"/api/v1/{path}", self._guarded(each), methods=["POST"]) for path, each in posts.items()),
                *(Route(f"/api/v1/{path}", self._guarded(each), methods=["GET"]) for path, each in gets.items()),
                Route("/api/v1/healthz", _health, methods=["GET"]),
                Route("/files/{tenant}/{model}/{name}/{file}", self._file, methods=["GET"]),
                Route(checkpoint, self._guarded(self._delete), methods=["DELETE"]),
                Route(f"{checkpoint}/publish", self._guarded(self._publish), methods=["DELETE"]),
                Route(f"{checkpoint}/ttl", self._guarded(self._set_ttl), methods=["PUT"]),
            ],
            exception_handlers={404: _unknown_path, 405: _unknown_path},
        )

    def _guarded(
        self, handle: Callable[[str, Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Answer those with a key, and turn errors into answers."""

        async def endpoint(request: Request) -> Response:
            tenant = self._tenant(request)
            if tenant is None:
                return _refusal(401, "this key is no tenant's: set TINKER_API_KEY to one that the server knows")
            try:
                return await handle(tenant, request)
            except ClientDisconnect:
                return Response(status_code=_LEFT)
            except TimeoutError:
                return _refusal(408, "the body did not come in time (timeout)")
            except TooLarge as error:
                return _refusal(413, str(error))
            except Busy as error:
                return _refusal(429, str(error))
            except Unknown as error:
                return _refusal(410 if isinstance(error, _Gone) else 404, str(error))
            except (MeshrlError, OSError) as error:
                failure = self._service.failure(error)
                return _refusal(400 if failure.category == "user" else 500, failure.error, failure.category)

        return endpoint

    def _tenant(self, request: Request) -> str | None:
        """Return whose key a request has. None if it is nobody's."""
        if not self._keys:
            return "default"
        digest = hashlib.sha256(request.headers.get("x-api-key", "").encode()).hexdigest()
        return next((name for known, name in self._keys.items() if hmac.compare_digest(known, digest)), None)

    async def _read(self, request: Request, kind: type[T]) -> T:
        return read_json(await self._body(request), kind)

    async def _body(self, request: Request) -> bytes:
        config = self._service.config.tinker
        return await read_body(request, config.body_mib << 20, config.timeout)

    # What clients are told first

    async def _client_config(self, tenant: str, request: Request) -> Response:
        config = self._service.config.tinker
        chunk = min(5_000_000, (config.body_mib << 20) // 2)
        return _json({"proto_compress_fwdbwd": config.compress, "fwdbwd_max_chunk_bytes_count": chunk})

    async def _dynamic_config(self, tenant: str, request: Request) -> Response:
        return _json({"sample_cancel_enabled": True})

    async def _telemetry(self, tenant: str, request: Request) -> Response:
        await self._body(request)
        return _json({"status": "accepted"})

    async def _capabilities(self, tenant: str, request: Request) -> Response:
        name = self._service.config.model
        return _json({"supported_models": [{"model_name": name, "trainable": True, "sampleable": True}]})

    # Sessions

    async def _create_session(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, NewSession)
        name = f"s{secrets.token_hex(12)}"
        self._service.library.shelf(tenant).put_session(
            Session(name, time.time(), asked.user_metadata, asked.tags, asked.project_id, asked.display_name)
        )
        return _json({"type": "create_session", "session_id": name})

    async def _heartbeat(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, OfSession)
        session = self._service.session(tenant, asked.session_id)
        if session.finished is not None:
            return _refusal(410, f"the session {session.id} has finished")
        return _json({"type": "session_heartbeat"})

    async def _finish(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, Finish)
        self._service.finish(tenant, request.path_params["session"], str(asked.reason.get("type", "success")))
        return Response(status_code=204)

    async def _sessions(self, tenant: str, request: Request) -> Response:
        found, _ = _page(self._service.library.shelf(tenant).sessions(), request)
        return _json({"sessions": [each.id for each in found]})

    async def _session(self, tenant: str, request: Request) -> Response:
        session = self._service.session(tenant, request.path_params["session"])
        shelf = self._service.library.shelf(tenant)
        return _json(
            {
                "training_run_ids": [each.id for each in shelf.models() if each.session == session.id],
                "sampler_ids": shelf.samplers(session.id),
                "user_metadata": listings.texts(session.user_metadata),
            }
        )

    async def _search_sessions(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, Search)
        shelf = self._service.library.shelf(tenant)
        found: list[dict[str, object]] = []
        counts: dict[str, list[Checkpoint]] = {}
        for checkpoint in shelf.checkpoints():
            counts.setdefault(checkpoint.model.session, []).append(checkpoint)
        for each in shelf.sessions():
            has = each.user_metadata or {}
            fits = asked.session_id in (None, each.id) and asked.display_name in (None, each.display_name)
            if fits and all(has.get(name) == value for name, value in asked.user_metadata.items()):
                found.append(
                    {
                        "session_id": each.id,
                        "created_at": listings.date(each.created),
                        "owner": tenant,
                        "project_id": each.project_id or "default",
                        "checkpoints_count": len(counts.get(each.id, ())),
                        "display_name": each.display_name,
                        "user_metadata": listings.texts(each.user_metadata),
                        "checkpoint_storage_bytes": sum(one.size_bytes for one in counts.get(each.id, ())),
                    }
                )
        return _json({"sessions": found[: asked.limit]})

    # Models

    async def _create_model(self, tenant: str, request: Request) -> Response:
        asked, most = await self._read(request, Create), self._service.config.tinker.max_rank
        if asked.lora_config is not None and asked.lora_config.rank > most:
            raise DataError(f"adapters of rank {asked.lora_config.rank}: this server has at most {most} (max_rank)")
        return _future(f"{self._service.create(tenant, asked)}:0")

    async def _load(self, tenant: str, request: Request) -> Response:
        body = await self._body(request)
        try:
            asked = read_json(body, Load)
        except DataError as error:
            return _future(self._refused(tenant, body, error))
        if asked.model_id is None:
            return _future(f"{self._service.create(tenant, asked)}:0")
        return _future(self._submitted(tenant, asked.model_id, asked.seq_id, asked))

    def _numbered(self, kind: type[Numbered]) -> Callable[[str, Request], Awaitable[Response]]:
        """Take requests of a kind that changes a model, or saves it."""

        async def handle(tenant: str, request: Request) -> Response:
            body = await self._body(request)
            try:
                asked = read_json(body, kind)
            except DataError as error:
                return _future(self._refused(tenant, body, error))
            return _future(self._submitted(tenant, str(asked.model_id), asked.seq_id, asked))

        return handle

    def _refused(self, tenant: str, body: bytes, error: DataError) -> str:
        """Let a body that cannot be read take the number that it has. The error if it has none."""
        try:
            known = read_json(body, Number)
        except DataError:
            raise error from None
        return self._submitted(tenant, known.model_id, known.seq_id, Refused(known.model_id, known.seq_id, str(error)))

    def _submitted(self, tenant: str, model: str, number: int | None, asked: Numbered | Pass | Refused | Call) -> str:
        if number is None or number < 1:
            raise DataError(f"a request of {model} has the number {number}: its seq_id counts from 1")
        return self._service.submit(tenant, model, number, asked)

    async def _pass(self, tenant: str, request: Request) -> Response:
        binary = request.headers.get("content-type", "").startswith(PROTOBUF)
        try:
            body = await self._body(request)
        except TooLarge as error:
            known = number_of(error.begin) if binary else None
            if known is None:
                raise
            asked: Pass | Refused = Refused(*known, str(error))
        else:
            try:
                asked = (pass_of_wire if binary else pass_of_json)(body, self._service.config.tinker.body_mib << 20)
            except DataError as error:
                if not binary:
                    return _future(self._refused(tenant, body, error))
                known = number_of(body)
                if known is None:
                    raise
                asked = Refused(*known, str(error))
        return _future(self._submitted(tenant, asked.model_id, asked.seq_id, asked))

    async def _unload(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, OfModel)
        self._service.unload(tenant, asked.model_id)
        return _json({"request_id": f"{asked.model_id}:unload", "model_id": asked.model_id})

    async def _get_info(self, tenant: str, request: Request) -> Response:
        model = self._service.model(tenant, (await self._read(request, OfModel)).model_id)
        name = self._service.config.model
        return _json(
            {
                "type": "get_info",
                "model_data": {"model_name": name, "tokenizer_id": name},
                "model_id": model.id,
                "is_lora": model.rank is not None,
                "lora_rank": model.rank,
                "model_name": name,
            }
        )

    # Results

    async def _retrieve(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, Retrieve)
        result = await self._result(tenant, asked.request_id)
        if result is None:
            pending = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return _json(pending, 408)
        body, kind = reply(result, binary=PROTOBUF in request.headers.get("accept", ""))
        if asked.allow_metadata_only and len(body) > _INLINE:
            return _json({"status": "complete_metadata", "response_payload_size": len(body)})
        self._samples.sent(tenant, asked.request_id)
        return Response(body, media_type=kind)

    async def _result(self, tenant: str, name: str) -> Result | None:
        """Return the result of a request, None if there is none yet. Unknown if it is nobody's."""
        if task := self._samples.get(tenant, name):
            await asyncio.wait([task], timeout=_WAIT)
            if task.cancelled():
                return Failure("the sample was cancelled", "user")
            return task.result() if task.done() else None
        model, _, number = name.rpartition(":")
        if ":train:" not in model or not number.isdigit():
            raise _Gone(f"there is no request {name}: it was made before the server was started, or is long done")
        queue = self._service.queue(tenant, model)
        if not queue.has(int(number)):
            raise _Gone(f"there is no result of {name}: it was removed when later states were written")
        return await queue.result(int(number), _WAIT)

    async def _cancel(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, Retrieve)
        if task := self._samples.get(tenant, asked.request_id):
            task.cancel()
        return Response(status_code=204)

    # Samples

    async def _create_sampler(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, NewSampler)
        sampler = self._service.create_sampler(
            tenant, asked.session_id, asked.sampling_session_seq_id, asked.base_model, asked.model_path
        )
        return _json({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def _join_sampler(self, tenant: str, request: Request) -> Response:
        sampler = self._service.sampler(tenant, (await self._read(request, OfSampler)).sampling_session_id)
        self._clones[sampler.id] += 1
        return _json({"type": "join_sampling_session", "client_counter": self._clones[sampler.id]})

    async def _sampler(self, tenant: str, request: Request) -> Response:
        sampler = self._service.sampler(tenant, request.path_params["sampler"])
        return _json({"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.path})

    async def _sample(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, Sample)
        if asked.sampling_session_id is not None:
            sampler = self._service.sampler(tenant, asked.sampling_session_id)
            number = f"once-{secrets.token_hex(12)}" if asked.seq_id is None else str(asked.seq_id)
            name, weights = f"{sampler.id}:{number}", sampler.path
        else:
            served, base = self._service.config.model, asked.base_model
            if base != served and (base is not None or asked.model_path is None):
                raise DataError(f"this server has no model {base!r}: it has {served!r}")
            name, weights = f"sample:{secrets.token_hex(12)}", asked.model_path
        draw = partial(self._drawn, tenant, weights, lambda: self._desk.sample(tenant, weights, asked, name))
        self._samples.begin(tenant, name, msgspec.json.encode(asked), draw)
        identities = [f"{name}:{each}" for each in range(asked.num_samples)]
        return _json({"request_id": name, "sample_sequence_ids": identities})

    async def _drawn(self, tenant: str, weights: str | None, draw: Callable[[], Awaitable[Result]]) -> Result:
        try:
            if weights is not None:
                self._service.library.find(tenant, weights)
            return await draw()
        except Exception as error:  # noqa: BLE001 -- the result of the request
            return self._service.failure(error)

    async def _generate(self, tenant: str, request: Request) -> Response:
        body = await self._body(request)
        asked = read_packed(body, Generate)
        draw = partial(self._drawn, tenant, asked.path, lambda: self._desk.generate(tenant, asked))
        self._samples.begin(tenant, asked.name, body, draw)
        return _json({"request_id": asked.name})

    async def _call(self, tenant: str, request: Request) -> Response:
        asked = read_packed(await self._body(request), Call)
        return _future(self._submitted(tenant, asked.model_id, asked.seq_id, asked))

    # Checkpoints

    async def _runs(self, tenant: str, request: Request) -> Response:
        found, cursor = _page(self._service.library.shelf(tenant).models(), request)
        return _json({"training_runs": [self._described(tenant, each) for each in found], "cursor": cursor})

    async def _run(self, tenant: str, request: Request) -> Response:
        return _json(self._described(tenant, self._service.model(tenant, request.path_params["model"])))

    def _described(self, tenant: str, model: Model) -> dict[str, object]:
        found = sorted(self._service.library.shelf(tenant).checkpoints(model.id), key=lambda each: each.time)
        last = {each.kind: listings.checkpoint(each) for each in found}
        return {
            "training_run_id": model.id,
            "base_model": model.base_model,
            "model_owner": tenant,
            "is_lora": model.rank is not None,
            "lora_rank": model.rank,
            "last_request_time": listings.date(max([model.created, *(each.time for each in found)])),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": listings.texts(model.user_metadata),
        }

    async def _checkpoints(self, tenant: str, request: Request) -> Response:
        model: str | None = request.path_params.get("model")
        if model is not None:
            self._service.model(tenant, model)
        found = sorted(self._service.library.shelf(tenant).checkpoints(model), key=lambda each: -each.time)
        cursor: dict[str, int] | None = None
        if model is None:
            found, cursor = _page(found, request)
        return _json({"checkpoints": [listings.checkpoint(each) for each in found], "cursor": cursor})

    async def _weights_info(self, tenant: str, request: Request) -> Response:
        asked = await self._read(request, AtPath)
        model = self._found(tenant, asked.tinker_path)[0].model
        return _json(
            {
                "base_model": model.base_model,
                "is_lora": model.rank is not None,
                "lora_rank": model.rank,
                "train_unembed": model.train_unembed,
                "train_mlp": model.train_mlp,
                "train_attn": model.train_attn,
            }
        )

    def _found(self, tenant: str, path: str) -> tuple[Checkpoint, Path]:
        try:
            return self._service.library.find(tenant, path)
        except DataError as error:
            raise Unknown(str(error)) from error

    def _own(self, tenant: str, request: Request) -> Checkpoint:
        """Return the tenant's checkpoint that a path names. Unknown if there is none."""
        model, kind, name = (request.path_params[each] for each in ("model", "kind", "name"))
        path = f"tinker://{model}/{kind}/{name}"
        found = self._service.library.shelf(tenant).checkpoint(path)
        if found is None:
            raise Unknown(f"there is no checkpoint {path}: it was never saved, or has expired")
        return found

    async def _delete(self, tenant: str, request: Request) -> Response:
        shelf = self._service.library.shelf(tenant)
        shelf.remove(shelf.checkpoint_folder(self._own(tenant, request).path))
        return Response(status_code=204)

    async def _publish(self, tenant: str, request: Request) -> Response:
        shelf, found = self._service.library.shelf(tenant), self._own(tenant, request)
        shelf.change(msgspec.structs.replace(found, public=request.method == "POST"))
        return Response(status_code=204)

    async def _set_ttl(self, tenant: str, request: Request) -> Response:
        asked, shelf = await self._read(request, Ttl), self._service.library.shelf(tenant)
        expires = None if asked.ttl_seconds is None else time.time() + asked.ttl_seconds
        shelf.change(msgspec.structs.replace(self._own(tenant, request), expires=expires))
        return Response(status_code=204)

    async def _storage(self, tenant: str, request: Request) -> Response:
        found = list(self._service.library.shelf(tenant).checkpoints())
        size = sum(each.size_bytes for each in found)
        used = {"checkpoint_count": len(found), "size_bytes": size, "size_gigabytes": size / 1e9}
        return _json({"data": [used]})

    async def _links(self, tenant: str, request: Request) -> Response:
        found = self._own(tenant, request)
        if found.kind != "external":
            raise DataError(f"{found.path} is not for other libraries: save it by save_weights_external")
        folder = self._service.library.shelf(tenant).checkpoint_folder(found.path) / "files"
        until = int(time.time()) + _LINKS
        urls: dict[str, str] = {}
        for file in sorted(path.name for path in folder.iterdir() if path.is_file()):
            place = f"/files/{tenant}/{quote(found.model.id)}/{found.path.rpartition('/')[2]}/{quote(file)}"
            signed = self._signature(tenant, found.path, file, until)
            urls[file] = f"{str(request.base_url).rstrip('/')}{place}?until={until}&signature={signed}"
        return _json({"urls": urls, "expires": listings.date(until)})

    def _signature(self, tenant: str, path: str, file: str, until: int) -> str:
        text = "\n".join((tenant, path, file, str(until)))
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    async def _file(self, request: Request) -> Response:
        """Send a file of a checkpoint to those who have a link to it."""
        tenant, model, name, file = (request.path_params[each] for each in ("tenant", "model", "name", "file"))
        until, given = request.query_params.get("until", ""), request.query_params.get("signature", "")
        try:
            path = library.path_of(model, "external", name)
            right = self._signature(tenant, path, file, int(until))
        except (DataError, ValueError):
            return _refusal(404, "there is no such file")
        gone = _refusal(404, "there is no such file, or the link has expired: ask for another")
        if not hmac.compare_digest(right.encode(), given.encode()) or int(until) < time.time():
            return gone  # before anything is looked up by names that are not ours
        folder = self._service.library.shelf(tenant).checkpoint_folder(path) / "files"
        if not (folder / file).is_file():
            return gone
        return FileResponse(folder / file)


class _Gone(Unknown):
    """A result that is here no more."""


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def _future(name: str) -> Response:
    return _json({"request_id": name, "model_id": name.rpartition(":")[0]})


def _refusal(status: int, message: str, category: str = "user") -> Response:
    return _json({"error": message, "category": category}, status)


def _page(found: list[T], request: Request) -> tuple[list[T], dict[str, int]]:
    """Return the part of a list that a request asks for, and where it lies."""
    try:
        limit, offset = (int(request.query_params.get(name, usual)) for name, usual in (("limit", 20), ("offset", 0)))
    except ValueError as error:
        raise DataError("limit and offset must be numbers") from error
    if limit < 0 or offset < 0:
        raise DataError("limit and offset must be at least 0")
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


async def _health(_: Request) -> Response:
    return _json({"status": "ok"})


async def _unknown_path(request: Request, error: Exception) -> Response:
    status = cast("int", getattr(error, "status_code", 404))
    return _refusal(status, f"{request.method} {request.url.path} is not served: docs/tinker.md lists what is")
