"""The sampler of an engine: sends rows as orders to its process, and converts results to rollouts."""

import asyncio
import tempfile
import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import ClassVar, Final, cast

import msgspec
import numpy as np
import torch

from meshrl import log
from meshrl.data import BASE, ArrivalLog, Batch, Constraint, Images, Weights, read_constraint
from meshrl.errors import ConfigError, DataError, MeshrlError, ModelError
from meshrl.mesh import current_rank
from meshrl.roles import NewModel, Sampler, SamplerConfig, Sampling, chosen_options, options_of, places_of
from meshrl_inference.engine_side import protocol
from meshrl_inference.group import engine_size, gather_gpus, runs_engine
from meshrl_inference.options import EngineOptions, check_temperature
from meshrl_inference.process import EngineConnection, EngineProcess, Kind
from meshrl_torch.model import saving as checkpoint
from meshrl_torch.model.decoding import stopped_after
from meshrl_torch.model.loading import folder_of, load, plain_folder, read_words
from meshrl_torch.model.text import Words
from meshrl_torch.sample.draw import key
from meshrl_torch.sample.rollouts import Finished, Request, Rollouts
from meshrl_torch.weights.live_weights import LiveWeights
from meshrl_torch.weights.transfer import check_probe, mean_difference

_SEEDS: Final = (1 << 63) - 1
_MAX_RANK: Final = 32
"""Highest rank of adapters if none is declared."""


class Call:
    """One call of `generate`, while its rows are decoded."""

    def __init__(self, number: int, first: int, request: Request, versions: Mapping[str, int]) -> None:
        """`versions`: those of all adapters now."""
        self.number = number
        """Below 0 for a call outside training, which is not aborted and is in no record."""
        self.first = first
        """The engine's number of its first row."""
        self.request = request
        self.unfinished = set(range(first, first + len(request.rows)))
        self.results = asyncio.Queue[list[protocol.FinishedRow] | ModelError]()
        self.loads = [(0, name, version) for name, version in versions.items()]
        """Versions of adapters, each with the number of the load from which on it counts."""

    def version_at(self, adapter: str, load: int) -> int:
        """Return the version of an adapter after the engine's load of this number."""
        return next(version for at, name, version in reversed(self.loads) if name == adapter and at <= load)


def finished(call: Call, words: Words, done: Sequence[protocol.FinishedRow]) -> Finished:
    """Convert results to the rows of a batch."""
    request = call.request
    order = np.array([each.number - call.first for each in done])
    done = [_cut(request, words, int(row), each) for row, each in zip(order, done, strict=True)]
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for row, adapter, each in zip(request.prefix[order].tolist(), request.adapters[order].tolist(), done, strict=True):
        prefix, tokens = np.array(request.prefixes[row], np.int32), np.frombuffer(each.tokens, np.int32)
        versions = np.zeros(len(tokens), np.int32)
        for number, start in each.spans:
            versions[start:] = call.version_at(adapter, number)
        before = len(prefix)
        pieces.append(
            (
                np.concatenate([prefix, tokens]),
                np.concatenate([np.zeros(before, np.float32), np.frombuffer(each.logprobs, np.float32)]),
                np.concatenate([np.full(before, -1, np.int32), versions]),
            )
        )
    tokens, logprobs, versions = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return Finished(
        rows=request.rows[order],
        lengths=np.array([len(piece[0]) for piece in pieces]),
        prompts=request.starts[order],
        truncated=np.array([each.reason == "length" for each in done]),
        aborted=np.array([each.reason == "abort" for each in done]),
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
    )


def _cut(request: Request, words: Words, row: int, done: protocol.FinishedRow) -> protocol.FinishedRow:
    """End a row that continued earlier tokens at a stop text that begins in these.

    The engine looks for stop texts only in what it samples.
    """
    prefix, start = request.prefixes[int(request.prefix[row])], int(request.starts[row])
    if len(prefix) == start or not request.stop:
        return done
    tokens = np.frombuffer(done.tokens, np.int32)
    end = stopped_after(words, [*prefix, *tokens.tolist()], start, len(prefix), request.stop)
    if end is None:
        return done
    new = end - len(prefix)
    logprobs = np.frombuffer(done.logprobs, np.float32)[:new].tobytes()
    return msgspec.structs.replace(done, tokens=tokens[:new].tobytes(), logprobs=logprobs, reason="stop")


def _sent(tensor: torch.Tensor, dtype: torch.dtype) -> protocol.SentTensor:
    """Return a tensor for a message, in this dtype if it has floats."""
    own = tensor.to(dtype) if tensor.is_floating_point() else tensor
    data = own.reshape(-1).view(torch.uint8).numpy().tobytes()
    return protocol.SentTensor(str(own.dtype).removeprefix("torch."), list(own.shape), data)


class _PendingLoad:
    """Weights being loaded. Keeps their buffers alive until the engine has copied them."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.number = 0
        """The engine's number of this load."""
        self.places: asyncio.Future[Batch] = asyncio.get_running_loop().create_future()

    def end(self, places: Batch) -> None:
        """Report that they are in use."""
        if not self.places.done():  # else nobody waits any more
            self.places.set_result(places)

    def fail(self, error: MeshrlError) -> None:
        """Report that they were refused."""
        if not self.places.done():
            self.places.set_exception(error)


class EngineSampler(Sampler):
    """Continuous batching by an engine over all calls of `generate`. It decodes even while nobody reads.

    Samples depend on the seeds, the weights' version, the number of calls since they were loaded, and the row's number
    in the call. Float sums depend on the rows that are decoded together, so a borderline sample may differ.

    A backend names its engine, and reads its table of options.
    """

    kind: ClassVar[Kind]
    options: ClassVar[type[EngineOptions]]
    temperatures: ClassVar[tuple[float, float]]
    """The lowest temperature above 0 and the highest that the engine supports."""
    axes: ClassVar[tuple[str, ...]] = ("dp", "tp")
    """The axes of a mesh of such samplers."""

    def __init__(self, config: SamplerConfig) -> None:
        rank = current_rank()
        if config.declared and not self.kind.takes_adapters:
            key = "lora" if config.lora else "adapters.NAME"
            raise ConfigError(
                f'the backend {self.kind.backend!r} needs whole weights: set policy.{key}.sync = "merged"'
            )
        if config.record_experts:
            raise ConfigError(
                f"the backend {self.kind.backend!r} does not report the experts of tokens: remove "
                'sampler.record_experts, or use sampler.backend = "torch"'
            )
        if unknown := {axis: size for axis, size in rank.shape.items() if axis not in self.axes and size > 1}:
            known = " and ".join(self.axes)
            raise ConfigError(f"the backend {self.kind.backend!r} knows {known} alone, and its mesh has {unknown}")
        self._config = config
        gpus = gather_gpus(rank)
        self._ranks = {name: (lora.rank, lora.alpha) for name, lora in config.declared.items()}
        """Rank and alpha of each adapter."""
        self._lends = not runs_engine(rank)
        """True if the first rank along tp runs the engine for this rank too."""
        if self._lends:
            return
        model = config.model
        folder = self._new(model) if isinstance(model, NewModel) else plain_folder(folder_of(model))
        self._words = read_words(config, folder)
        self._engine = self._start(folder, gpus)
        self._close = weakref.finalize(self, self._engine.close)
        self._versions = dict.fromkeys((BASE, *config.declared), 0)
        """Of the whole model, and of each adapter by name."""
        self._refused = ""
        """Why the engine decodes nothing. Empty if it does."""
        self._readers = rank.size if engine_size(rank) > 1 else 0
        """Number of processes that read a broadcast at once if ranks along tp share engines, else 0."""
        self._numbers = count()
        self._calls: dict[int, Call] = {}
        self._begun = 0
        self._beside = 0
        """Number of calls outside training."""
        self._first: dict[str, tuple[int, int]] = {}
        """Of both kinds of calls, the numbers at the last load of each adapter."""
        self._sent = 0
        """Number of loads that the engine was asked for."""
        self._loads = 0
        self._loading = asyncio.Lock()
        self._pending: deque[_PendingLoad] = deque()
        """Loads that the engine has not answered yet."""
        self._arrivals = ArrivalLog()

    def _start(self, folder: Path, gpus: list[str]) -> EngineConnection:
        config, rank, options = self._config, current_rank(), options_of(self._config, self.options)
        start = protocol.Start(
            str(folder.absolute()), config.dtype, self._words.max_tokens, config.slots, rank.threads,
            engine_size(rank), gpus, options.kv_cache_mib, options.memory_share, options.eager, options.sleep,
            options.own, dict(options.args), options.room[0] if self._max_rank else 0, self._max_rank,
            self._words.vision.token if self._words.vision and self._takes_images() else None,
        )  # fmt: skip
        engine = EngineProcess(self.kind, start, options.python, options.start_timeout)
        log.info(f"{self.kind.title} runs", version=engine.version, process=engine.pid)
        return engine

    @property
    def _max_rank(self) -> int:
        """The highest rank of an adapter. 0 if the engine takes none."""
        if not self.kind.takes_adapters or (self._config.lora is None and self._config.adapters is None):
            return 0
        declared = max((lora.rank for lora in self._config.declared.values()), default=_MAX_RANK)
        return options_of(self._config, self.options).room[1] or declared

    @property
    def _recomputes(self) -> bool:
        """True if running rows read their tokens again with new weights."""
        return options_of(self._config, self.options).kv_after_update == "recompute"

    @property
    def engine_pid(self) -> int:
        """The engine's process. 0 on a rank without one."""
        return 0 if self._lends else self._engine.pid

    def close(self) -> None:
        """End the engine, which ends with this object too."""
        if not self._lends:
            self._close()

    async def generate(self, prompts: Batch, sampling: Sampling) -> AsyncIterator[Batch]:
        """Yield finished rollouts, all of a step together. Without rows, yields one empty batch.

        DataError for a temperature that the engine does not support, and for unknown tokens. ModelError if only part of
        a broadcast has arrived.
        """
        if self._lends:
            return
        if self._refused:
            raise ModelError(self._refused)
        self._check_draws(sampling)
        rollouts = Rollouts(self._words, prompts, sampling, adapters=self._ranks, sees=self.kind.sees)
        request = rollouts.request
        self._check_images(request)
        self._check_known(request)
        self._check_constraints(request)
        if len(rollouts.ended.rows) or not len(rollouts.rows):
            yield rollouts.batch(rollouts.ended, self._versions)
        if not len(request.rows):
            self._next_number(sampling)  # samples depend on the number of calls, on whichever ranks they had rows
            return
        versions, call = dict(self._versions), self._begin(request, sampling)
        try:
            while call.unfinished:
                results = await call.results.get()
                if isinstance(results, ModelError):
                    raise results
                call.unfinished.difference_update(done.number for done in results)
                yield rollouts.batch(finished(call, self._words, results), versions)
        finally:
            del self._calls[call.number]
            if call.unfinished:
                with suppress(ModelError):  # the engine has ended, and they with it
                    self._engine.send(protocol.Abort(sorted(call.unfinished), wanted=False))

    async def load(self, weights: Weights) -> Batch:
        """Put the weights into shared memory while the engine decodes. It takes them between two steps.

        ModelError, and the old ones stay in use, if they are of another model, differ from the sent bytes, or are an
        adapter's and this sampler takes none, or the other way round. If the engine then computes something else than
        the policy, it is ended. A broadcast is received between two steps, by engines that can. If only part of it
        arrives, the engine decodes nothing until others come.
        """
        if (refusal := self._refusal(weights)) is not None:
            raise ModelError(f"weights of version {weights.version} were not loaded, because {refusal}")
        if self._lends:
            return places_of({}, 0)
        async with self._loading:
            self._listen()
            if isinstance(weights, LiveWeights):
                weights.check_quantized(chosen_options(self._config).quantized)
            is_broadcast = self.kind.reads_broadcasts and isinstance(weights, LiveWeights)
            pending = _PendingLoad(weights if is_broadcast else await asyncio.to_thread(weights.shared))
            self._engine.send(self._order(pending.weights))
            pending.number = self._sent
            self._pending.append(pending)
            places = await pending.places
            self._arrivals.note(weights)
        return places

    def _order(self, weights: Weights) -> protocol.Load:
        """Return the order to load weights that are in shared memory, or that the engine is to read."""
        self._sent += 1
        probe = [row.tolist() for row in weights.probe.tokens] if weights.probe else []
        if isinstance(weights, LiveWeights):
            together = self._readers or weights.together
            return protocol.Load(weights.version, [], self._recomputes, probe, weights.manifest, together, self._sent)
        buckets = [
            protocol.SharedBucket(
                bucket.segment.path,
                [
                    protocol.SharedTensor(name, entry.dtype, list(entry.shape), entry.start, entry.fingerprint)
                    for name, entry in bucket.index.items()
                ],
            )
            for bucket in weights.buckets
            if bucket.segment
        ]
        adapter = weights.adapter and protocol.AdapterOf(*weights.adapter)
        return protocol.Load(weights.version, buckets, self._recomputes, probe, number=self._sent, adapter=adapter)

    def _refusal(self, weights: Weights) -> str | None:
        """Return why these weights cannot be loaded, whatever is in them, or None."""
        of, backend = weights.adapter, self.kind.backend
        if of is None:
            refusal = "they are a whole model's, and an engine with adapters keeps its base: publish with adapter=NAME"
            return refusal if self._max_rank else None
        if not self.kind.takes_adapters:
            return (
                f"they are those of the adapter {of.name!r} alone, and the backend {backend!r} needs whole weights: "
                'set sync = "merged" for this adapter at the policy, or use sampler.backend = "torch"'
            )
        if not self._max_rank:
            return (
                f"they are those of the adapter {of.name!r} alone, and the engine was started without room for any: "
                "write an empty table sampler.adapters, or declare the adapter there"
            )
        if of.rank > self._max_rank:
            most = f"sampler.{backend}.max_rank is {self._max_rank}"
            return f"the adapter {of.name!r} has rank {of.rank}, and {most}: raise it"
        if self._ranks.get(of.name, (of.rank, of.alpha)) != (of.rank, of.alpha):
            return (
                f"the adapter {of.name!r} has rank = {of.rank} and alpha = {of.alpha}, and this sampler's has "
                f"{self._ranks[of.name]}: give it the same in both tables, or call drop_adapter first"
            )
        return None

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter. DataError if there is none of that name, or rows are still decoded with it."""
        if self._lends:
            return
        if name not in self._ranks:
            raise DataError(f"there is no adapter {name!r} to drop: there are {', '.join(self._ranks) or 'none'}")
        if busy := sum(name in call.request.adapters for call in self._calls.values()):
            raise DataError(
                f"the adapter {name!r} decodes rows of {busy} calls of `generate`: wait for them, or abort them"
            )
        self._engine.send(protocol.Drop(name))
        del self._ranks[name], self._versions[name]

    async def replay(self, record: Batch) -> None:
        """Raise DataError: the time at which a row is decoded depends on the machine."""
        raise DataError(
            f"the {self.kind.title} sampler cannot repeat a record of {len(record)} places: its engine chooses the "
            'time of each step itself. Replay with sampler.backend = "torch"'
        )

    async def abort(self) -> None:
        """End all running calls, and return their rows as they are."""
        if self._lends:
            return
        for call in self._calls.values():
            if call.number >= 0:
                self._engine.send(protocol.Abort(sorted(call.unfinished), wanted=True))

    def _check_draws(self, sampling: Sampling) -> None:
        """Raise DataError if the engine cannot sample this way."""
        check_temperature(self.kind.title, self.temperatures, sampling)

    def _check_known(self, request: Request) -> None:
        for number in np.unique(request.prefix).tolist():
            least, most = min(request.prefixes[number]), max(request.prefixes[number])
            if not 0 <= least <= most < self._engine.tokens:
                row = request.rows[request.prefix == number][0]
                raise DataError(
                    f"row {row} has tokens from {least} to {most}, and the model knows those from 0 to "
                    f"{self._engine.tokens - 1}: give it rows of the model's tokenizer"
                )

    def _takes_images(self) -> bool:
        """True if the engine takes images for this model."""
        return False

    def _check_images(self, request: Request) -> None:
        """Raise ModelError if rows have images, and the engine takes none for this model."""

    def rule_of(self, constraint: Constraint) -> str:
        """Return a constraint as the engine reads it. DataError if it cannot follow that."""
        raise DataError(
            f"{constraint.text[:200]}: the backend {self.kind.backend!r} does not hold answers to constraints: use "
            'sampler.backend = "torch" or "vllm"'
        )

    def _check_constraints(self, request: Request) -> None:
        """Raise DataError before the call begins if the engine cannot follow one."""
        for index in np.flatnonzero(request.constraints != "").tolist():
            where = f"row {request.rows[index]}"
            self.rule_of(read_constraint(request.constraints[index], where))
            if len(request.prefixes[int(request.prefix[index])]) > request.starts[index]:
                raise DataError(
                    f"{where} has a constraint and the beginning of its answer, which {self.kind.title} would not "
                    'follow from there: draw the answer again from its start, or use sampler.backend = "torch"'
                )

    def _begin(self, request: Request, sampling: Sampling) -> Call:
        self._listen()
        numbers = [next(self._numbers) for _ in request.rows]
        own = -1 - numbers[0] if sampling.beside else self._begun
        call, turn = Call(own, numbers[0], request, self._versions), self._next_number(sampling)
        seeds = {
            name: key(self._config.seed, sampling.seed, version, turn - self._first.get(name, (0, 0))[sampling.beside])
            for name, version in self._versions.items()
        }
        rows: list[protocol.Row] = []
        for index, number in enumerate(numbers):
            prefix, adapter = request.prefixes[int(request.prefix[index])], str(request.adapters[index])
            left = int(request.starts[index] + request.limits[index]) - len(prefix)
            seed = int(key(int(seeds[adapter]), int(request.numbers[index]))) & _SEEDS
            text = str(request.constraints[index])
            rule = self.rule_of(read_constraint(text, f"row {request.rows[index]}")) if text else ""
            names = list(request.images[int(request.prefix[index])]) if request.images else []
            rows.append(protocol.Row(number, np.array(prefix, np.int32).tobytes(), left, seed, adapter, rule, names))
        self._engine.send(
            protocol.Generate(
                rows, sampling.temperature, sampling.top_p, sampling.top_k, sorted(request.ends), list(request.stop),
                self._seen(request.images, rows),
            )
        )  # fmt: skip
        self._calls[call.number] = call
        return call

    def _seen(self, images: Images | None, rows: Sequence[protocol.Row]) -> dict[str, protocol.SeenImage]:
        """Return what the processor made of each image of these rows, in the sampler's dtype."""
        vision, dtype = self._words.vision, cast("torch.dtype", getattr(torch, self._config.dtype))
        if images is None or vision is None:
            return {}
        found: dict[str, protocol.SeenImage] = {}
        for name in {name: None for row in rows for name in row.images}:
            seen = vision.seen(images, name, f"the image {name}")
            tensors = {key: _sent(each, dtype) for key, each in seen.inputs.items()}
            found[name] = protocol.SeenImage(seen.fingerprint, seen.tokens, tensors)
        return found

    def _next_number(self, sampling: Sampling) -> int:
        """Return the number of earlier calls. Calls outside training count separately: -1, -2, ..."""
        if sampling.beside:
            self._beside += 1
            return -self._beside
        self._begun += 1
        return self._begun - 1

    def _listen(self) -> None:
        self._engine.listen(self._on_answer, self._on_end)

    def _on_answer(self, answer: protocol.Answer) -> None:
        if isinstance(answer, protocol.Rows):
            for call in self._calls.values():
                if done := [each for each in answer.done if each.number in call.unfinished]:
                    call.results.put_nowait(done)
        elif isinstance(answer, protocol.Loaded):
            self._on_loaded(answer, self._pending.popleft())
        elif isinstance(answer, protocol.Refused):
            self._on_refused(answer, self._pending.popleft())

    def _on_refused(self, answer: protocol.Refused, pending: _PendingLoad) -> None:
        """Fail a load whose weights were not loaded, or only in part."""
        version = pending.weights.version
        if not answer.usable:
            self._refused = (
                f"weights of version {version} did not come whole, and some are in use: publish again, since "
                f"{self.kind.title} decodes nothing until others come"
            )
            for call in self._calls.values():
                self._engine.send(protocol.Abort(sorted(call.unfinished), wanted=False))
                call.results.put_nowait(ModelError(self._refused))
        if answer.lost and isinstance(pending.weights, LiveWeights):
            pending.fail(pending.weights.lost(answer.lost, answer.text))
            return
        name = pending.weights.adapter.name if pending.weights.adapter else BASE
        now = (
            f"continues with version {self._versions.get(name, 0)}"
            if answer.usable
            else "decodes nothing until others come"
        )
        pending.fail(ModelError(f"weights of version {version} were not loaded, and the engine {now}: {answer.text}"))

    def _on_loaded(self, answer: protocol.Loaded, pending: _PendingLoad) -> None:
        """End a load with the places where its weights came into use."""
        probe = pending.weights.probe
        measured = {"pause": answer.seconds, "cache": answer.cache}
        if probe is not None:
            measured["difference"] = mean_difference(probe, np.frombuffer(answer.logprobs, np.float32))
            try:
                dtype = chosen_options(self._config).quantized or self._config.dtype
                check_probe(pending.weights, measured["difference"], dtype)
            except ModelError as error:
                pending.fail(error)
                self._engine.fail(error)
                self._on_end(error)
                return
        if isinstance(pending.weights, LiveWeights):
            pending.weights.arrived(answer.transport)
        name, self._refused = BASE, ""
        if (of := pending.weights.adapter) is not None:
            name, self._ranks[of.name] = of.name, (of.rank, of.alpha)
        self._versions[name], self._first[name] = answer.version, (self._begun, -self._beside)
        for call in self._calls.values():
            call.loads.append((pending.number, name, answer.version))
        numbered = [number for number in self._calls if number >= 0]
        steps = dict.fromkeys(numbered, answer.steps) | {self._begun: -1}
        pending.end(places_of(steps, self._loads, **measured))
        self._loads += 1

    def _on_end(self, error: ModelError) -> None:
        for call in self._calls.values():
            call.results.put_nowait(error)
        for pending in self._pending:
            pending.fail(error)
        self._pending.clear()

    def _new(self, model: NewModel) -> Path:
        """Make a folder of a new model. It is removed with this object."""
        temporary = tempfile.TemporaryDirectory(prefix="meshrl-model-")
        weakref.finalize(self, temporary.cleanup)
        folder = Path(temporary.name, "model")
        checkpoint.write(load(self._config), str(folder))
        return folder
