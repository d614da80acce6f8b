"""SGLang's engine for `meshrl_inference.engine_side.worker`, with its schedulers in separate processes."""

# SGLang may be in another environment than this one.
# pyright: reportMissingImports=false

import asyncio
import inspect
import os
import runpy
import signal
import sys
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from meshrl_inference.engine_side.arguments import with_args
from meshrl_inference.engine_side.protocol import (
    CACHE,
    CPU_CACHE_MIB,
    IN_SHARED_MEMORY,
    Engine,
    FinishedRow,
    Generate,
    Load,
    Outcome,
    Row,
    Start,
    set_environment,
)
from meshrl_torch.wire import nccl

_MOMENT: Final = 0.02
"""Most seconds that a step waits."""
_IDLE: Final = 60.0
"""Seconds within which stopped rows must leave the schedulers."""
_FIRST: Final = 1000
"""The priority of a probe's sequences, for which decoded rows make room."""
_BESIDE: Final = 8
"""Free places that SGLang wants after the longest row."""
_GRAPHS: Final = "cuda_graph"
"""Sleeps and wakes with the KV cache."""


def start(settings: Start) -> Engine:
    """Start the engine."""
    # Before the import of torch and SGLang, which read these.
    set_environment(settings)
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by `_BESIDE`, where tokens never are
    import torch  # noqa: PLC0415 -- `start` has set its environment

    if torch.cuda.is_available():
        nccl.set_alike()
    else:
        _compute_without_gpu(settings.tp)
    return _SglangEngine(settings, gpu=torch.cuda.is_available())


def _compute_without_gpu(tp: int) -> None:
    os.environ.update(SGLANG_USE_CPU_ENGINE="1", TORCH_COMPILE_DISABLE="1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads leave the cores to other processes
    if tp > 1:
        # Otherwise each would have a whole NUMA node. SGLang binds them only if it has kernels for CPUs.
        cores = sorted(os.sched_getaffinity(0))
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[at % len(cores)]) for at in range(tp))
    if find_spec("sgl_kernel") is None:
        standins = str(Path(__file__).parent / "standins")
        os.environ["PYTHONPATH"] = os.pathsep.join([standins, os.environ.get("PYTHONPATH", "")])
        sys.path.insert(0, standins)
        runpy.run_path(f"{standins}/sitecustomize.py")  # as the children of this process do at their start


class _SglangEngine:
    def __init__(self, settings: Start, *, gpu: bool) -> None:
        import sglang  # noqa: PLC0415 -- `start` has set its environment

        from meshrl_sglang import scheduler, transfer  # noqa: PLC0415

        self._folder = settings.model
        self._tp = settings.tp
        self._reads_back = bool(settings.own["verify_weights"])
        self._transfer = transfer
        self._engine = scheduler.Processes(**_arguments(settings, gpu))
        self._manager = self._engine.tokenizer_manager
        self._manager.tokenizer = scheduler.Texts(settings.model)
        self._loop: asyncio.AbstractEventLoop = self._engine.loop
        self._loop.run_until_complete(self._hear())
        self._rows: dict[int, asyncio.Task[None]] = {}
        self._unsent = set[int]()
        """Rows that may be unknown to the schedulers."""
        self._ended = asyncio.Event()
        self._errors: list[BaseException] = []
        self.version: str = sglang.__version__
        self.tokens = int(self._manager.model_config.vocab_size)
        self.steps = 0
        self.finished: list[FinishedRow] = []

    @property
    def cache_use(self) -> float:
        # The schedulers write it into shared memory now and then.
        return max((float(each.token_usage) for each in self._manager.load_snapshot_reader.read_all()), default=0.0)

    @property
    def processes(self) -> list[BaseProcess]:
        return self._engine.schedulers

    @property
    def decodes(self) -> bool:
        return bool(self._rows)

    def add(self, order: Generate, salt: str) -> None:
        keys = {
            "temperature": order.temperature,
            "top_p": order.top_p,
            "top_k": order.top_k or -1,
            "stop_token_ids": order.ends,
            "ignore_eos": not order.ends,
            "stop": order.stop or None,
        }
        for row in order.rows:
            self._rows[row.number] = self._loop.create_task(self._decode(row, keys, salt))
            self._unsent.add(row.number)

    def abort(self, rows: list[int], *, wanted: bool) -> None:
        """Stop decoding these rows. With `wanted`, they come back in a step, as a scheduler then has them."""
        self._loop.run_until_complete(self._all_sent())
        for row in rows:
            if row not in self._rows:
                continue
            if wanted:
                self._manager.abort_request(_name(row))
            else:
                self._rows.pop(row).cancel()  # which aborts it

    def step(self, orders: Connection) -> None:
        self._loop.run_until_complete(self._wait(orders.fileno()))
        self.steps += 1
        if self._errors:
            raise self._errors[0]

    def load(self, order: Load) -> Outcome:
        with TemporaryDirectory() as answers:
            return self._loop.run_until_complete(self._load(order, answers))

    def drop(self, adapter: str) -> None:
        """Do nothing: there are no adapters, because SGLang's layers for them need a GPU's pinned memory."""

    def read(self, probe: list[list[int]], salt: str, adapter: str) -> list[float]:
        """Read sequences before all waiting rows. If no slot is free, a row gives its slot up."""
        return self._loop.run_until_complete(self._read(probe, salt))

    def sleep(self) -> None:
        """Free the GPU's memory. The weights move to the host's."""
        from sglang.srt.managers import io_struct as io  # noqa: PLC0415

        flushed = self._loop.run_until_complete(self._manager.flush_cache(timeout_s=_IDLE))  # waits for rows that left
        if not flushed.success:
            raise RuntimeError(f"SGLang cannot sleep: rows are still in its schedulers after {_IDLE:g} s")
        self._loop.run_until_complete(self._manager.release_memory_occupation(io.ReleaseMemoryOccupationReqInput()))

    def wake(self, names: list[str]) -> None:
        from sglang.srt.managers import io_struct as io  # noqa: PLC0415

        tags = [*names, *([_GRAPHS] if CACHE in names else [])]
        order = io.ResumeMemoryOccupationReqInput(tags=tags)
        self._loop.run_until_complete(self._manager.resume_memory_occupation(order))

    async def _hear(self) -> None:
        """Receive the schedulers' messages in this loop. Signals stay with the worker."""
        self._manager.auto_create_handle_loop()
        for each in (signal.SIGQUIT, signal.SIGTERM):
            self._loop.remove_signal_handler(each)
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)

    async def _wait(self, orders: int) -> None:
        self._loop.add_reader(orders, self._ended.set)
        try:
            async with asyncio.timeout(_MOMENT):
                await self._ended.wait()
        except TimeoutError:
            pass
        finally:
            self._loop.remove_reader(orders)
            os.set_blocking(orders, True)
            self._ended.clear()

    async def _decode(self, row: Row, keys: dict[str, Any], salt: str) -> None:
        try:
            answer = await self._ask(
                _name(row.number),
                np.frombuffer(row.tokens, np.int32).tolist(),
                {**keys, "max_new_tokens": row.max_tokens, "sampling_seed": row.seed},
                salt,
            )
            self.finished.append(_done(row.number, answer))
        except Exception as error:  # noqa: BLE001 -- the waiter gets it, whatever it is
            self._errors.append(error)
        finally:
            self._rows.pop(row.number, None)
            self._unsent.discard(row.number)
            self._ended.set()

    async def _ask(self, name: str, tokens: list[int], keys: dict[str, Any], salt: str, **more: Any) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: PLC0415

        priority = {"priority": 0, **more}
        request = GenerateReqInput(
            rid=name, input_ids=tokens, sampling_params=keys, return_logprob=True, cache_salt=salt, **priority
        )
        last: dict[str, Any] = {}
        async for answer in self._manager.generate_request(request, None):
            last = answer
        return last

    async def _all_sent(self) -> None:
        """Wait until the schedulers know all rows, so that later messages arrive after them."""
        while self._unsent:
            states = self._manager.rid_to_state
            known = [(number, states.get(_name(number))) for number in self._unsent]
            self._unsent -= {number for number, state in known if state is not None and state.dispatched}
            if self._unsent:
                await asyncio.sleep(0)

    async def _load(self, order: Load, answers: str) -> Outcome:
        from sglang.srt.managers import io_struct as io  # noqa: PLC0415
        from sglang.srt.utils import MultiprocessingSerializer  # noqa: PLC0415

        manager = self._manager
        await self._all_sent()
        sent = self._transfer.WeightsMessage(
            self._folder, order.buckets, order.manifest, order.together, answers, self._reads_back
        )
        tensors = sent.encode()
        await manager.pause_generation(io.PauseGenerationReqInput(mode="retract" if order.recompute else "in_place"))
        _check(await manager.begin_weight_update(io.BeginWeightUpdateReqInput()))
        update = io.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(tensors) for _ in range(self._tp)],
            load_format=self._transfer.FORMAT,
            flush_cache=order.recompute,
        )
        _check(await manager.update_weights_from_tensor(update))
        _check(await manager.end_weight_update(io.EndWeightUpdateReqInput()))
        outcome = Outcome.of_all(sent.outcomes) if order.manifest is not None else IN_SHARED_MEMORY
        if not outcome.transport:
            if not outcome.begun:  # all weights are the old ones
                await manager.continue_generation(io.ContinueGenerationReqInput())
            return outcome
        if self._reads_back:
            await self._transfer.read_back(manager, sent.firsts)
        version = io.UpdateWeightVersionReqInput(new_version=str(order.number), abort_all_requests=False)
        await manager.update_weight_version(version)
        await manager.continue_generation(io.ContinueGenerationReqInput())
        return outcome

    async def _read(self, probe: list[list[int]], salt: str) -> list[float]:
        reading = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        requests = [
            self._ask(f"{salt} {at}.", tokens, reading, f"{salt} {at}", logprob_start_len=0, priority=_FIRST)
            for at, tokens in enumerate(probe)
        ]
        answer = await asyncio.gather(*requests)
        return [float(value) for each in answer for value, *_ in each["meta_info"]["input_token_logprobs"][1:]]


def _arguments(settings: Start, gpu: bool) -> dict[str, Any]:
    import sglang  # noqa: PLC0415 -- `start` has set its environment

    longest = settings.max_tokens + _BESIDE
    heads, bytes_per_token = _attention(settings)
    if heads % settings.tp:
        raise ValueError(f"the model's {heads} attention heads cannot be split over {settings.tp} ranks along tp")
    arguments: dict[str, Any] = {
        "model_path": settings.model,
        "dtype": settings.dtype,
        "context_length": longest,
        "max_running_requests": settings.slots,
        "tp_size": settings.tp,
        "mem_fraction_static": settings.memory_share,
        "disable_cuda_graph": settings.eager or not gpu,
        "enable_memory_saver": settings.sleep and gpu,  # on a CPU, sleeping frees nothing
        "enable_weights_cpu_backup": settings.sleep and gpu,
        "sampling_backend": "pytorch",  # the others ignore seeds
        "disable_overlap_schedule": True,  # otherwise a step of old weights would end after a load, as new
        "sleep_on_idle": True,  # otherwise each idle scheduler uses a core
        "enable_priority_scheduling": True,
        "custom_weight_loader": ["meshrl_sglang.transfer.load"],
        "custom_sigquit_handler": signal.SIG_IGN,  # the worker watches for processes that end
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "weight_version": "0",
        "random_seed": 0,
        "log_level": "error",
    }
    cache = settings.kv_cache_mib or (None if gpu else CPU_CACHE_MIB)
    if cache is not None:
        arguments["max_total_tokens"] = max(longest, (cache << 20) // bytes_per_token)
    if not gpu:
        arguments |= {"device": "cpu", "attention_backend": "torch_native"}
    known = inspect.signature(sglang.ServerArgs).parameters
    return with_args(arguments, settings.args, known, f"SGLang {sglang.__version__}")


def _attention(settings: Start) -> tuple[int, int]:
    """Return the model's attention heads, and the bytes of a token's keys and values on each place along tp."""
    import torch  # noqa: PLC0415 -- `start` has set its environment
    from transformers import AutoConfig  # noqa: PLC0415

    config = AutoConfig.from_pretrained(settings.model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dims = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return config.num_attention_heads, 2 * config.num_hidden_layers * -(-heads // settings.tp) * dims * dtype.itemsize


def _name(row: int) -> str:
    """Return SGLang's name of a row. No name begins with another, because both would be aborted."""
    return f"{row}."


def _check(answer: tuple[bool, str]) -> None:
    done, why = answer
    if not done:
        raise RuntimeError(f"SGLang refuses new weights: {why}")


def _done(number: int, answer: dict[str, Any]) -> FinishedRow:
    facts = answer["meta_info"]
    pairs = facts.get("output_token_logprobs") or ()
    tokens, logprobs = [int(token) for _, token, *_ in pairs], [float(value) for value, *_ in pairs]
    spans = [(int(span["version"]), int(span["start"])) for span in facts.get("weight_versions") or ()]
    return FinishedRow.of(number, tokens, logprobs, spans, facts["finish_reason"]["type"])
