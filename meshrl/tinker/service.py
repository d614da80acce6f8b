"""What the server does: sessions, models and their requests, checkpoints, and samples.

A model's state lives in the trainer while it is needed, and else on disk: the newest state and the journal of what came
after it. A restart and a change of models are the same: the state is read, and the requests after it are applied again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Literal, cast

import msgspec
import numpy as np
from pydantic import ValidationError

from meshrl import log
from meshrl.data import Batch
from meshrl.errors import ConfigError, DataError, MeshrlError, RankFailed, described
from meshrl.events import Request as RequestEvent
from meshrl.events import sink
from meshrl.remote import Call, Made, Packed
from meshrl.roles import Step
from meshrl.run import is_machine_fault
from meshrl.tinker import library
from meshrl.tinker.config import ServedConfig, TenantConfig
from meshrl.tinker.journal import Journal
from meshrl.tinker.library import Checkpoint, Kind, Library, Model, Sampler, Session
from meshrl.tinker.models import Models
from meshrl.tinker.queues import Busy, ModelQueue, Pending, Room, Turn, Worker
from meshrl.tinker.requests import (
    Create,
    Load,
    OptimStep,
    Pass,
    Refused,
    Request,
    Save,
    SaveExternal,
    SaveForSampler,
)
from meshrl.tinker.results import Failure, Plain, Result
from meshrl.tinker.rows import batch_of, loss_of, losses_of, passed
from meshrl.tinker.weights_file import version_in

_STATE: Final = "state-{:010}"
_UNNAMED: Final = "unnamed-{:08}"
"""The name of weights for samplers that a client gave no name."""
_TOGETHER: Final = 16
"""Models whose rows go into one call, at most."""
_AGAIN: Final = 60.0
"""Seconds until it is tried again to write a state that could not be written."""
_JOURNAL_BYTES: Final = 1 << 28
"""Size of a journal's file at which a state is written."""


class Unknown(DataError):
    """There is nothing of this name, or it belongs to someone else."""


class Service:
    """The server without HTTP."""

    def __init__(self, config: ServedConfig, models: Models, folder: Path, room: Room) -> None:
        self.config: Final = config
        self.library: Final = Library(folder)
        self.models: Final = models
        self._room = room
        self._queues: dict[str, ModelQueue] = {}
        self._resident: dict[str, None] = {}
        """The models in the trainer, the one that was used last at the end."""
        self._store: set[str] = set()
        """Models whose state is to be written as soon as that is possible."""
        self._not_before: dict[str, float] = {}
        """Monotonic seconds before which no state of a model is tried, because one could not be written."""
        self._heard: dict[str, float] = {}
        """Monotonic seconds of the last sign of each session's client."""
        self._stored: dict[str, tuple[float, int]] = {}
        """Monotonic seconds at which the files of a tenant were counted, and their bytes."""
        self.worker: Final = Worker(self._apply, min(models.most, _TOGETHER))

    async def run(self) -> None:
        """Apply requests until this is cancelled. Raises what ends the server, such as the loss of a rank."""
        expiring = asyncio.create_task(self._expire())
        try:
            await self.worker.run(self._after)
        finally:
            expiring.cancel()

    async def _expire(self) -> None:
        """Let go of what clients have left who give no sign any more."""
        while True:
            await asyncio.sleep(self.config.tinker.session_timeout / 4)
            since = time.monotonic() - self.config.tinker.session_timeout
            self._heard = {session: heard for session, heard in self._heard.items() if heard > since}
            for queue in self._queues.values():
                if queue.model.partition(":")[0] not in self._heard:
                    queue.leave()

    def close(self) -> None:
        """Close all journals."""
        for queue in self._queues.values():
            queue.journal.close()

    # Sessions

    def tenant(self, name: str) -> TenantConfig | None:
        """Return a tenant's quotas. None without tenants."""
        return self.config.tinker.tenants.get(name)

    def session(self, tenant: str, name: str) -> Session:
        """Return a tenant's session. Unknown if there is none."""
        found = self.library.shelf(tenant).session(name)
        if found is None:
            raise Unknown(f"there is no session {name}: create one")
        self._heard[name] = time.monotonic()
        return found

    def model(self, tenant: str, name: str) -> Model:
        """Return a tenant's model. Unknown if there is none."""
        found = self.library.shelf(tenant).model(name)
        if found is None:
            raise Unknown(f"there is no model {name}: create one, or load a checkpoint into a new one")
        return found

    # Requests of models

    def create(self, tenant: str, request: Create | Load) -> str:
        """Take the first request of a model, and return the model's name."""
        session, number = request.session_id, request.model_seq_id
        if session is None or number is None:
            raise DataError("a new model needs session_id and model_seq_id")
        self.session(tenant, session)
        name, shelf = f"{session}:train:{number}", self.library.shelf(tenant)
        if shelf.model(name) is None:
            shelf.put_model(self._described(tenant, name, request))
        self.submit(tenant, name, 0, request)
        return name

    def _described(self, tenant: str, name: str, request: Create | Load) -> Model:
        """Return the facts about a new model. DataError if this server cannot make it."""
        quota = self.tenant(tenant)
        mine = [each for each in self._queues.values() if each.tenant == tenant and not each.closed]
        if quota is not None and len(mine) >= quota.models:
            raise DataError(f"this key trains {len(mine)} models, which is the most: unload one, or finish its session")
        if isinstance(request, Load):
            found, _ = self.library.find(tenant, request.path)
            base = found.model
        else:
            lora = request.lora_config if self.config.policy.is_adapted else None
            base = Model(name, str(request.session_id), request.base_model, time.time())
            if lora is not None:
                seed = self.config.policy.seed if lora.seed is None else lora.seed
                parts = {
                    "train_mlp": lora.train_mlp,
                    "train_attn": lora.train_attn,
                    "train_unembed": lora.train_unembed,
                }
                base = msgspec.structs.replace(base, rank=lora.rank, seed=seed, **parts)
        optimizer = request.optimizer_config
        if optimizer is not None and optimizer.type != "adamw":
            raise DataError(f"this server has no optimizer {optimizer.type!r}: take adamw")
        if base.base_model != self.config.model:
            raise DataError(f"this server has no model {base.base_model!r}: it has {self.config.model!r}")
        return msgspec.structs.replace(
            base, id=name, session=str(request.session_id), created=time.time(), user_metadata=request.user_metadata
        )

    def submit(self, tenant: str, model: str, number: int, request: Request) -> str:
        """Take a request of a model, and return its name. A repetition gets the name that it had.

        Raises Unknown, Conflict and Busy.
        """
        queue = self.queue(tenant, model)
        has_rows = isinstance(request, Pass) or (isinstance(request, Call) and request.batch is not None)
        if has_rows and number >= queue.next and not queue.has(number):
            self._check_storage(tenant)
        before = queue.journal.nbytes
        if queue.add(number, request):
            self.worker.wake()
            counted, used = self._stored.get(tenant, (0.0, 0))
            self._stored[tenant] = counted, used + queue.journal.nbytes - before
        return f"{model}:{number}"

    def _check_storage(self, tenant: str) -> None:
        """Raise Busy if a tenant's files leave no room for rows in a journal. Counts them again after a second."""
        quota, now = self.tenant(tenant), time.monotonic()
        if quota is None:
            return
        counted, used = self._stored.get(tenant, (0.0, 0))
        if now - counted > 1.0:
            used = self.library.shelf(tenant).nbytes()
            self._stored[tenant] = now, used
        if used > quota.storage_gib * 2**30:
            raise Busy(f"the files of this key have {used:,} bytes, which is the most: delete some checkpoints")

    def queue(self, tenant: str, model: str) -> ModelQueue:
        """Return the requests of a model, from disk if this is the first that is asked of it since the start."""
        queue = self._queues.get(model)
        if queue is not None and queue.tenant == tenant:
            self._heard[model.partition(":")[0]] = time.monotonic()
            return queue
        session = self.model(tenant, model).session
        self._forget()
        folder = self.library.shelf(tenant).model_folder(model)
        queue = ModelQueue(model, tenant, Journal(folder, keeps=self.config.tinker.record), self._room)
        queue.restore(_newest(folder))
        queue.closed = queue.next > 0  # it counts again when it is used again
        if self.session(tenant, session).finished is not None:
            queue.leave()
        self._queues[model] = queue
        self.worker.add(queue)
        return queue

    def _forget(self) -> None:
        """Let go of models that clients are done with. What is asked of them is read from disk again."""
        for model, queue in list(self._queues.items()):
            if queue.closed and queue.is_idle and model not in self._resident:
                queue.journal.close()
                del self._queues[model]
                self._not_before.pop(model, None)
                self.worker.remove(queue)

    def unload(self, tenant: str, model: str) -> None:
        """Take a model's place in the trainer from it, until it is used again."""
        self.queue(tenant, model).closed = True

    def finish(self, tenant: str, session: str, reason: str) -> None:
        """End a session. Its models no longer count."""
        shelf = self.library.shelf(tenant)
        shelf.put_session(msgspec.structs.replace(self.session(tenant, session), finished=reason))
        for queue in self._queues.values():
            if queue.tenant == tenant and queue.model.startswith(f"{session}:"):
                queue.leave()

    async def _apply(self, group: Sequence[Turn]) -> list[Result]:
        """Apply requests. Machine faults are raised, and other errors are the request's result."""
        event_log = sink.get()
        began = event_log.now() if event_log else 0.0
        results = await self._guarded(group)
        if event_log is None:
            return results
        for (queue, pending), result in zip(group, results, strict=True):
            received = max(0.0, began - (time.time() - pending.received))
            event = RequestEvent(
                queue.model, pending.number, _verb(pending.request), queue.tenant, received, began, event_log.now()
            )
            rows, tokens = pending.size
            if rows:
                event = msgspec.structs.replace(event, rows=rows, tokens=tokens)
            if isinstance(result, Failure):
                event = msgspec.structs.replace(event, error=result.error)
            event_log.emit(event)
        return results

    async def _guarded(self, group: Sequence[Turn]) -> list[Result]:
        try:
            for queue, _ in group:
                await self._bring(queue)
            if len(group) > 1 and isinstance(group[0][1].request, OptimStep):
                return [each for (each,) in await asyncio.gather(*(self._guarded([one]) for one in group))]
            if len(group) > 1:
                return await self._passed(group)
            queue, pending = group[0]
            return [await self._result(queue, pending)]
        except Exception as error:  # whatever it is, it is of these requests, and the server goes on
            if is_machine_fault(error):
                raise
            failure = self.failure(error)
            is_begun = any(queue.changing for queue, _ in group)
            for queue, pending in group:
                refused = failure.category == "user" and isinstance(pending.request, Pass)
                if queue.changing and not refused:
                    await self._leave(queue)  # whatever it has changed is undone
                queue.changing = False
            if len(group) > 1 and (failure.category == "user" or not is_begun):
                # One of them does not fit, or cannot be brought, and nothing has changed.
                return [each for one in group for each in await self._guarded([one])]
            return [failure] * len(group)

    async def _passed(self, group: Sequence[Turn]) -> list[Result]:
        """Add the gradients of requests of several models in one call."""
        requests = [cast("Pass", pending.request) for _, pending in group]
        loss, batches = loss_of(requests[0]), [batch_of(each) for each in requests]
        for queue, _ in group:
            queue.changing = True
        rows = await self.models.forward_backward([queue.model for queue, _ in group], batches, loss)
        for queue, _ in group:
            queue.changing, queue.accumulating = False, True
        return [
            passed(own, batch.ragged("logprobs"), np.asarray(batch.ragged("losses").values, np.float32))
            for own, batch in zip(batches, rows, strict=True)
        ]

    async def _bring(self, queue: ModelQueue) -> None:
        """Bring a model into the trainer: its newest state, and then the requests since."""
        queue.closed = False
        if queue.model in self._resident:
            self._resident[queue.model] = self._resident.pop(queue.model)  # the last in order
            return
        while len(self._resident) >= self.models.most:
            await self._park(self._queues[next(iter(self._resident))])
        await self.models.create(self.model(queue.tenant, queue.model))
        try:
            await self._restored(queue)
        except Exception as error:
            if not is_machine_fault(error):
                await self._leave(queue)  # it is not as its client knows it, so nothing may be applied to it
            raise
        self._resident[queue.model] = None

    async def _restored(self, queue: ModelQueue) -> None:
        """Give a new model in the trainer its newest state, and apply the requests again that succeeded since."""
        queue.steps = 0
        if queue.state >= 0:
            state = self.library.shelf(queue.tenant).model_folder(queue.model) / _STATE.format(queue.state)
            await self.models.read_state(queue.model, state, optimizer=True)
        redo = queue.applied() if queue.state < queue.next - 1 else []
        if redo:
            log.info(f"{queue.model}: {len(redo)} requests after its last state are applied again")
        for done in redo:
            try:
                await self._changed(queue, done.request)
            except Exception as error:
                if is_machine_fault(error):
                    raise
                raise MeshrlError(
                    f"request {done.number} of {queue.model} succeeded before, and after state {queue.state} it cannot "
                    f"be applied again: {described(error)}. Restore what it needs, or load a checkpoint into another "
                    "model"
                ) from error

    async def _park(self, queue: ModelQueue) -> None:
        """Make room in the trainer. What is in no state is applied again when the model is brought back."""
        try:
            await self._write_state(queue)
        except (MeshrlError, OSError) as error:
            if is_machine_fault(error):
                raise
            self._warn(queue, error)
        await self._leave(queue)

    async def _leave(self, queue: ModelQueue) -> None:
        """Take a model out of the trainer, as if it had never been there. Its state and its journal are on disk."""
        self._resident.pop(queue.model, None)
        queue.accumulating = queue.changing = False
        try:
            await self.models.drop(queue.model)
        except (MeshrlError, OSError) as error:
            if is_machine_fault(error):
                raise
            log.warning(f"{queue.model} cannot be dropped from the trainer", error=described(error))

    def _warn(self, queue: ModelQueue, error: Exception) -> None:
        log.warning(
            f"no state of {queue.model} can be written: its journal since request {queue.state} is kept",
            error=described(error),
        )

    async def _after(self, queue: ModelQueue) -> None:
        """Write a state if it is due."""
        if queue.model not in self._resident:
            return
        due = queue.steps >= self.config.tinker.state_every or queue.journal.nbytes > _JOURNAL_BYTES
        if not (due or queue.model in self._store) or time.monotonic() < self._not_before.get(queue.model, 0.0):
            return
        try:
            await self._write_state(queue)
        except (MeshrlError, OSError) as error:
            if is_machine_fault(error):
                raise
            self._warn(queue, error)
            self._not_before[queue.model] = time.monotonic() + _AGAIN

    async def _write_state(self, queue: ModelQueue) -> None:
        """Write a model's state next to its journal, unless it has gradients without a step, or nothing new."""
        number = queue.next - 1
        if queue.accumulating or queue.is_begun or number == queue.state:
            return
        folder = self.library.shelf(queue.tenant).model_folder(queue.model)
        part, state = folder / ".state", folder / _STATE.format(number)
        library.clear(part)
        await self.models.write_state(queue.model, part)
        await asyncio.to_thread(library.sync, part)
        library.clear(state)  # one that was written before, of which the journal could not take note
        part.rename(state)
        kept = queue.state
        queue.stored(number)
        self._store.discard(queue.model)
        for old in folder.glob("state-*"):
            if int(old.name.removeprefix("state-")) < kept:
                library.clear(old)

    async def _changed(self, queue: ModelQueue, request: Request) -> Result | None:
        """Do what a request does to the model in the trainer. None if it does nothing to it."""
        model = queue.model
        if isinstance(request, Pass) and request.backward:
            return (await self._passed([(queue, Pending(0, request, 0))]))[0]
        if isinstance(request, OptimStep):
            if request.adam_params is None:
                kind = (request.optimizer_params or {}).get("type")
                raise DataError(f"this server has no optimizer {kind!r}: send AdamParams")
            queue.changing = True
            metrics = await self.models.step(model, request.adam_params)
            queue.changing = queue.accumulating = False
            queue.steps += 1
            return Plain({"metrics": dict(metrics), "type": "optim_step"})
        if isinstance(request, Call) and request.verb in ("update", "forward_backward", "step"):
            return await self._called(queue, request)
        if isinstance(request, Load):
            _, folder = self.library.find(queue.tenant, request.path)
            queue.changing = True
            await self.models.read_state(model, folder / "state", optimizer=request.optimizer)
            queue.changing = queue.accumulating = False
            self._store.add(model)  # so that the checkpoint is not needed again
            return Plain({"path": request.path, "model_id": model, "type": "load_weights"})
        return None

    async def _called(self, queue: ModelQueue, request: Call) -> Made:
        """Add the gradients of a client of ours, or step, or both."""
        made, step = Made(), _step_of(request)
        if request.verb != "step":
            batch, loss = request.rows()
            queue.changing = True
            result = await self.models.called(queue.model, batch, loss)
            queue.changing, queue.accumulating = False, True
            made = Made(Packed.of(result.rows), dict(result.metrics.entries))
        if request.verb != "forward_backward":
            queue.changing = True
            metrics = await self.models.stepped(queue.model, step)
            queue.changing = queue.accumulating = False
            queue.steps += 1
            made = Made(sums=dict(metrics.entries))
        return made

    async def _told(self, queue: ModelQueue, number: int, request: Call) -> Made:
        """Do what changes nothing for a client of ours: keep weights for samplers, or compute log-probs."""
        if request.verb == "weights":
            await self._save_for_sampler(queue, number, SaveForSampler(queue.model, request.seq_id))
            path = library.path_of(queue.model, "sampler", _UNNAMED.format(number))
            return Made(path=path, version=version_in(self.weights_folder(queue.tenant, path)))
        if request.verb == "encode":
            return Made(Packed.of(await self.models.encoded(request.batch_of())))
        logprobs = await self.models.logprobs(queue.model, request.batch_of())
        return Made(Packed.of(Batch.of(logprobs=logprobs)))

    async def _result(self, queue: ModelQueue, pending: Pending) -> Result:
        request, model = pending.request, queue.model
        changed = await self._changed(queue, request)
        if changed is not None:
            return changed
        if isinstance(request, Pass):
            loss, batch = loss_of(request), batch_of(request)
            logprobs = await self.models.logprobs(model, batch)
            return passed(batch, logprobs, losses_of(loss, batch, logprobs))
        if isinstance(request, Refused):
            return Failure(request.error, "user")
        if isinstance(request, Call):
            return await self._told(queue, pending.number, request)
        return await self._saved(queue, pending.number, request)

    async def repeated(self, queue: ModelQueue, request: Request) -> Result:
        """Return what a request results in now, for a model in the trainer that nobody else uses."""
        return await self._result(queue, Pending(0, request, 0))

    async def _saved(self, queue: ModelQueue, number: int, request: Request) -> Result:
        """Keep what a request wants to be kept. One that made the model has nothing left to do."""
        model = queue.model
        if isinstance(request, Save):
            return await self._save(queue, number, request)
        if isinstance(request, SaveForSampler):
            return await self._save_for_sampler(queue, number, request)
        if isinstance(request, SaveExternal):
            if request.age_encryption_recipients:
                raise DataError("this server does not encrypt weights: leave age_encryption_recipients out")
            path = library.path_of(model, "external", request.path)
            write = lambda folder: self.models.write_files(model, folder / "files")  # noqa: E731
            await self._checkpoint(queue, number, path, "external", request, write)
            return Plain({"path": path, "type": "save_weights_external"})
        return Plain({"model_id": model, "type": "create_model"})

    async def _save(self, queue: ModelQueue, number: int, request: Save) -> Result:
        if queue.accumulating:
            raise DataError(
                "the model has gradients of which no step was made, and a state does not hold them: call optim_step "
                "before save_state"
            )
        path = library.path_of(queue.model, "training", request.path or f"{number:06}")
        found = self.library.shelf(queue.tenant).checkpoint(path)
        if found is not None and found.seq_id != number and not request.overwrite:
            raise DataError(f"there is a checkpoint {path} already: choose another name, or set overwrite")
        write = lambda folder: self.models.write_state(queue.model, folder / "state")  # noqa: E731
        await self._checkpoint(queue, number, path, "training", request, write)
        return Plain({"path": path, "type": "save_weights"})

    async def _save_for_sampler(self, queue: ModelQueue, number: int, request: SaveForSampler) -> Result:
        model = self.model(queue.tenant, queue.model)
        if request.kind != "snapshot":
            raise DataError(f"this server has no weights of the kind {request.kind!r}: take snapshots")
        name = request.path or _UNNAMED.format(number)
        path = library.path_of(queue.model, "sampler", name)
        write = lambda folder: self.models.write_weights(queue.model, folder / "weights")  # noqa: E731
        await self._checkpoint(queue, number, path, "sampler", request, write)
        if request.path is not None:
            return Plain({"path": path, "type": "save_weights_for_sampler"})
        shelf = self.library.shelf(queue.tenant)
        sampler = Sampler(f"{model.session}:sample:{request.sampling_session_seq_id or 0}", model.base_model, path)
        shelf.put_sampler(sampler)
        unnamed = [each for each in shelf.checkpoints(queue.model) if each.name.startswith("sampler_weights/unnamed-")]
        for old in unnamed[: -self.config.tinker.samplers_kept]:
            shelf.remove(shelf.checkpoint_folder(old.path))
        return Plain({"sampling_session_id": sampler.id, "type": "save_weights_for_sampler"})

    async def _checkpoint(
        self,
        queue: ModelQueue,
        number: int,
        path: str,
        kind: Kind,
        request: Save | SaveForSampler | SaveExternal,
        write: Callable[[Path], Awaitable[None]],
    ) -> None:
        """Write a checkpoint, unless it is there from before a restart."""
        shelf, now = self.library.shelf(queue.tenant), time.time()
        found = shelf.checkpoint(path)
        if found is not None and found.seq_id == number:
            return
        quota = self.tenant(queue.tenant)
        if quota is not None and (used := shelf.nbytes()) > quota.storage_gib * 2**30:
            raise DataError(f"the files of this key have {used:,} bytes, which is the most: delete some checkpoints")
        metadata = getattr(request, "user_metadata", None)
        expires = None if request.ttl_seconds is None else now + request.ttl_seconds
        about = Checkpoint(
            path, kind, self.model(queue.tenant, queue.model), now, number, expires=expires, user_metadata=metadata
        )
        with shelf.writing(about) as folder:
            await write(folder)

    # Sampling sessions

    def create_sampler(self, tenant: str, session: str, number: int, base: str | None, path: str | None) -> Sampler:
        """Make a sampling session, of the base model or of saved weights. DataError if there are none."""
        self.session(tenant, session)
        if path is not None:
            self.weights_folder(tenant, path)
            base = self.library.find(tenant, path)[0].model.base_model
        if base != self.config.model:
            raise DataError(f"this server has no model {base!r}: it has {self.config.model!r}")
        sampler = Sampler(f"{session}:sample:{number}", self.config.model, path)
        self.library.shelf(tenant).put_sampler(sampler)
        return sampler

    def weights_folder(self, tenant: str, path: str) -> Path:
        """Return the folder of weights for samplers that a tenant may read. DataError if there are none."""
        found, folder = self.library.find(tenant, path)
        if found.kind != "sampler":
            raise DataError(f"{path} holds no weights for samplers: save them with save_weights_for_sampler")
        return folder / "weights"

    def sampler(self, tenant: str, name: str) -> Sampler:
        """Return a tenant's sampling session. Unknown if there is none."""
        found = self.library.shelf(tenant).sampler(name)
        if found is None:
            raise Unknown(f"there is no sampling session {name}: create one")
        return found

    def failure(self, error: BaseException) -> Failure:
        """Return the result of a request that failed. It says who is to blame, and not where the server keeps what."""
        cause = error.__cause__ if isinstance(error, RankFailed) and error.__cause__ else error
        category: Literal["user", "server"] = "user" if isinstance(cause, DataError | ConfigError) else "server"
        if category == "server":
            log.warning("a request failed", error=described(cause))
        if isinstance(cause, MeshrlError):
            folder = self.library.folder
            text = str(cause).replace(f"{folder.absolute()}/", "").replace(f"{folder}/", "")
        else:
            why = cause.strerror if isinstance(cause, OSError) else None
            text = f"{type(cause).__name__}: {why or 'the log of the server says more'}"
        return Failure(text, category)


def _newest(folder: Path) -> int:
    """Return the number of the newest state in a model's folder. -1 if there is none."""
    return max((int(path.name.removeprefix("state-")) for path in folder.glob("state-*")), default=-1)


def _step_of(request: Call) -> Step:
    try:
        return Step.model_validate(request.step or {})
    except ValidationError as error:
        raise DataError(f"the step cannot have these values: {error}") from error


def _verb(request: Request) -> str:
    if isinstance(request, Pass):
        return "forward_backward" if request.backward else "forward"
    if isinstance(request, Call):
        return request.verb
    return str(type(request).__struct_config__.tag)
