"""vLLM's engine for `meshrl_inference.engine_side.worker`: in the worker's process, one step at a time."""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false

import os
import shutil
from dataclasses import fields
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final, get_args

import numpy as np
from msgspec import structs

from meshrl_inference.engine_side.arguments import with_args
from meshrl_inference.engine_side.protocol import (
    CPU_CACHE_MIB,
    IN_SHARED_MEMORY,
    PROBES,
    AdapterOf,
    Engine,
    FinishedRow,
    Generate,
    Load,
    Outcome,
    Start,
    set_environment,
)
from meshrl_torch.wire import nccl

_CPU_READS: Final = 4096
"""Most tokens read in one step on a CPU."""
_IMAGE_STEPS: Final = 8
"""Steps' worth of image tokens that vLLM's encoder cache holds on a CPU."""
_FOR_IMAGES: Final = {
    "limit_mm_per_prompt": {"video": 0},
    "mm_processor_cache_gb": 0,  # a call has each image once
    "mm_device_do_normalize": False,  # the sampler's processor has done so
}
_PROBE: Final = "probe "
"""The prefix of the names of requests that read a probe."""


def start(settings: Start) -> Engine:
    """Start the engine."""
    # Before the import of vLLM, which reads these.
    set_environment(settings)
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "0"  # they have nothing to finish
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # a rank gets a number of cores, no particular ones
    from vllm.platforms import current_platform  # noqa: PLC0415 -- it reads the variables

    if current_platform.is_cpu():
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    else:
        nccl.set_alike()
    return _VllmEngine(settings)


class _VllmEngine:
    def __init__(self, settings: Start) -> None:
        import vllm  # noqa: PLC0415 -- `start` has set its environment
        from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415

        self._vllm = vllm
        self._slots = settings.slots
        # The use on which vLLM bases its number of tokens in a step. Its default reads 2048 at once.
        use = UsageContext.LLM_CLASS
        config = _arguments(settings).create_engine_config(use)
        scheduler = config.scheduler_config
        if settings.image_token is not None and not scheduler.enable_chunked_prefill:
            # Else a prompt would be read in parts, if images of its cached tokens have to be seen again.
            room = _IMAGE_STEPS * scheduler.max_num_batched_tokens
            scheduler.max_num_encoder_input_tokens = scheduler.encoder_cache_size = room
        self._engine = vllm.LLMEngine.from_vllm_config(config, use, disable_log_stats=True)
        self._images = None
        if settings.image_token is not None:
            from meshrl_vllm.image_features import ImageFeatures  # noqa: PLC0415 -- as above

            self._images = ImageFeatures(self._engine, settings.image_token)
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        self._engine.collective_rpc("return_whole_logprobs")
        if settings.adapters:
            self._engine.collective_rpc("leave_rows_without")
        self._engine.set_weight_version("0")
        self._unread: dict[str, list[float]] = {}
        """The log-probs of a probe's sequences, by the requests that read them. Empty for unread ones."""
        self._adapters: dict[str, Any] = {}
        """What requests of loaded adapters carry, by name. vLLM reads their folders again if it has had to forget
        them."""
        self._ids = count(1)
        self._folder = Path(mkdtemp(prefix="adapters-"))
        self._loaded = 0
        """The number of the last load."""
        self._without: dict[int, int] = {}
        """Rows that were begun before their adapter was loaded, and are decoded without it, with that number."""
        self._seats(0)
        self.version: str = vllm.__version__
        self.tokens = int(self._engine.model_config.get_vocab_size())
        self.steps = 0
        self.finished: list[FinishedRow] = []

    @property
    def processes(self) -> list[BaseProcess]:
        return [handle.proc for handle in getattr(self._core.model_executor, "workers", ())]

    @property
    def cache_use(self) -> float:
        return float(self._core.scheduler.kv_cache_manager.usage)

    @property
    def decodes(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def add(self, order: Generate, salt: str) -> None:
        items = self._images.items(order.images) if self._images else {}
        for row in order.rows:
            sampling = self._sampling(
                temperature=order.temperature,
                top_p=order.top_p,
                top_k=order.top_k,
                seed=row.seed,
                max_tokens=row.max_tokens,
                ignore_eos=True,  # meshrl decides where rows end
                stop_token_ids=order.ends,
                stop=order.stop or None,
                detokenize=bool(order.stop),
                skip_special_tokens=False,
                logprobs=0,
                structured_outputs=self._held(row.rule),
            )
            if row.adapter and row.adapter not in self._adapters:
                self._without[row.number] = self._loaded
            tokens = np.frombuffer(row.tokens, np.int32)
            prompt: Any = {"prompt_token_ids": tokens.tolist(), "cache_salt": salt}
            if self._images and row.images:
                seen = [order.images[name] for name in row.images]
                prompt = self._images.prompt(tokens, salt, seen, [items[name] for name in row.images])
            self._ask(str(row.number), prompt, sampling, adapter=row.adapter)

    def abort(self, rows: list[int], *, wanted: bool) -> None:
        """Stop decoding these rows. vLLM has their tokens at hand."""
        processor = self._engine.output_processor
        states = {state.external_req_id: state for state in processor.request_states.values()}
        here = [states[str(number)] for number in rows if str(number) in states]
        if wanted:
            self.finished += [self._at_its_load(_unfinished(state)) for state in here]
        for number in rows:
            self._without.pop(number, None)
        self._engine.abort_request([str(state.external_req_id) for state in here])

    def step(self, orders: Connection | None) -> None:
        for output in self._engine.step():
            if not output.finished:
                continue
            if output.request_id in self._unread:
                self._unread[output.request_id] = _read(output)
            else:
                self.finished.append(self._at_its_load(_done(output)))
        self.steps += 1

    def load(self, order: Load) -> Outcome:
        if order.adapter is not None:
            return self._load_adapter(order, order.adapter)
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        self._engine.collective_rpc("start_weight_update")
        update = {"buckets": order.buckets, "manifest": order.manifest, "together": order.together}
        self._engine.collective_rpc("update_weights", kwargs={"update_info": update})
        self._engine.collective_rpc("finish_weight_update")
        is_broadcast = order.manifest is not None
        outcome = Outcome.of_all(self._engine.collective_rpc("broadcast_outcome")) if is_broadcast else IN_SHARED_MEMORY
        if outcome.transport:
            self._in_use(order)
        if outcome.transport or not outcome.begun:  # else some weights are new and others old
            self._core.resume_scheduler()
        return outcome

    def _load_adapter(self, order: Load, of: AdapterOf) -> Outcome:
        """Put an adapter in the place of its earlier version, which vLLM drops after it has read the new one."""
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 -- `start` has set its environment

        from meshrl_inference.engine_side.loading import write_adapter  # noqa: PLC0415 -- as above

        number = self._adapters[of.name].lora_int_id if of.name in self._adapters else next(self._ids)
        folder, new = self._folder / str(number), self._folder / "new"
        shutil.rmtree(new, ignore_errors=True)
        try:
            write_adapter(new, order, of)
            self._engine.add_lora(LoRARequest(of.name, number, str(new), load_inplace=True))
        except Exception as error:  # noqa: BLE001 -- whatever the disk or vLLM has against it, the earlier version is in use
            shutil.rmtree(new, ignore_errors=True)
            return Outcome(reason=f"vLLM refuses the adapter {of.name!r}: {type(error).__name__}: {error}")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
        self._adapters[of.name] = LoRARequest(of.name, number, str(folder))
        self._in_use(order)
        return IN_SHARED_MEMORY

    def _in_use(self, order: Load) -> None:
        """Count new weights from the next step on."""
        self._loaded = order.number
        self._engine.set_weight_version(str(order.number))
        if self._images:  # what they saw is that of the weights before
            # Not by the engine's method, which warns of caches of a processor: that one is off.
            self._core.scheduler.reset_encoder_cache()
            self._core.model_executor.reset_encoder_cache()
        if order.recompute:
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def _at_its_load(self, done: FinishedRow) -> FinishedRow:
        """Return a row with no later load than those that it was decoded with."""
        number = self._without.pop(done.number, None)
        return done if number is None else structs.replace(done, spans=[(number, 0)])

    def drop(self, adapter: str) -> None:
        if (known := self._adapters.pop(adapter, None)) is not None:
            self._engine.remove_lora(known.lora_int_id)
            shutil.rmtree(known.lora_path)

    def read(self, probe: list[list[int]], salt: str, adapter: str) -> list[float]:
        """Read sequences before all waiting rows, in separate seats."""
        self._seats(len(probe))
        self._unread = {f"{_PROBE}{number}": [] for number in range(len(probe))}
        reading = self._sampling(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        for name, tokens in zip(self._unread, probe, strict=True):
            prompt = {"prompt_token_ids": tokens, "cache_salt": f"{salt} {name}"}
            self._ask(name, prompt, reading, priority=-1, adapter=adapter)
        while not all(self._unread.values()):
            self.step(None)
        values = [value for row in self._unread.values() for value in row]
        self._unread = {}
        self._seats(0)
        return values

    def sleep(self) -> None:
        """Free the GPU's memory. The weights move to the host's."""
        self._engine.sleep(level=1)

    def wake(self, names: list[str]) -> None:
        self._engine.wake_up(names)

    def _held(self, rule: str) -> Any:
        return self._vllm.sampling_params.StructuredOutputsParams(grammar=rule) if rule else None

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def _sampling(self, **keys: object) -> Any:
        return self._vllm.SamplingParams(**keys, output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY)

    def _ask(self, name: str, prompt: Any, sampling: Any, *, adapter: str, priority: int = 0) -> None:
        lora = self._adapters.get(adapter)
        self._engine.add_request(name, prompt, sampling, lora_request=lora, priority=priority)

    def _seats(self, extra: int) -> None:
        """Set the number of rows decoded at once, in addition to the slots."""
        self._core.scheduler.max_num_active_reqs = self._slots + extra


def _arguments(settings: Start) -> Any:
    from vllm import EngineArgs, __version__  # noqa: PLC0415 -- `start` has set its environment
    from vllm.config import StructuredOutputsConfig  # noqa: PLC0415
    from vllm.config.weight_transfer import WeightTransferConfig  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    from meshrl_vllm import quantized, towers, transfer  # noqa: PLC0415

    in_fp8 = settings.own["quantization"] == "fp8"
    cpu = current_platform.is_cpu()
    cache = settings.kv_cache_mib or (CPU_CACHE_MIB if cpu else None)
    as_fp8 = {"load_format": quantized.NAME, "hf_overrides": {"quantization_config": quantized.CONFIG}}
    for_images = {"load_format": towers.NAME, **_FOR_IMAGES} if settings.image_token is not None else {}
    own: dict[str, Any] = dict(
        **{**for_images, **(as_fp8 if in_fp8 else {})},
        model=settings.model,
        dtype=settings.dtype,
        max_model_len=settings.max_tokens,
        max_num_seqs=settings.slots + PROBES,
        # A row that is read in parts resets its seed's generator, which generators on CPUs cannot do.
        enable_chunked_prefill=False if cpu else None,
        max_num_batched_tokens=max(_CPU_READS, settings.max_tokens) if cpu else None,
        scheduling_policy="priority",
        async_scheduling=False,  # otherwise a step of the old weights would end after a load, under the new version
        tensor_parallel_size=settings.tp,
        distributed_executor_backend="mp" if settings.tp > 1 else None,
        enforce_eager=settings.eager or cpu,
        enable_sleep_mode=settings.sleep and not cpu,  # on a CPU, sleeping frees nothing
        kv_cache_memory_bytes=None if cache is None else cache << 20,
        gpu_memory_utilization=settings.memory_share,
        structured_outputs_config=StructuredOutputsConfig(backend="guidance"),  # the grammars of the torch sampler
        logprobs_mode="processed_logprobs",  # at the temperature, unlike raw ones
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=transfer.NAME),
        worker_extension_cls=f"{transfer.__name__}.{transfer.Extension.__name__}",
        **_for_adapters(settings, cpu=cpu),
    )
    return EngineArgs(
        **with_args(own, settings.args, {each.name for each in fields(EngineArgs)}, f"vLLM {__version__}")
    )


def _for_adapters(settings: Start, *, cpu: bool) -> dict[str, Any]:
    """Return the arguments that make room for adapters."""
    if not settings.adapters:
        return {}
    if settings.dtype == "float32" and not cpu:
        raise ValueError('vLLM\'s kernels for adapters on GPUs cannot read float32: set sampler.dtype = "bfloat16"')
    from vllm.config.lora import MaxLoRARanks  # noqa: PLC0415 -- `start` has set its environment

    from meshrl_inference.engine_side.loading import Naming  # noqa: PLC0415 -- as above

    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= settings.max_rank]
    if not ranks:
        raise ValueError(f"an adapter of rank {settings.max_rank}: vLLM's highest is {max(get_args(MaxLoRARanks))}")
    # Not the head: with an adapter on it, vLLM cannot tell the log-probs of a prompt, which a probe reads.
    names = sorted(Naming(settings.model).linear_names)
    return {
        "enable_lora": True, "max_loras": settings.adapters, "max_lora_rank": min(ranks), "lora_target_modules": names,
    }  # fmt: skip


def _read(output: Any) -> list[float]:
    """Return the log-probability of each token of a prompt except the first, from a finished request."""
    tokens = list(output.prompt_token_ids)[1:]
    return [each[token].logprob for token, each in zip(tokens, output.prompt_logprobs[1:], strict=True)]


def _done(output: Any) -> FinishedRow:
    (one,) = output.outputs
    spans = [(int(span.version), span.start) for span in one.weight_versions or ()]
    return _row(int(output.request_id), one.token_ids, one.logprobs, spans, one.finish_reason)


def _unfinished(state: Any) -> FinishedRow:
    spans = [(int(version), start) for version, start in state.weight_version_starts]
    tokens = state.detokenizer.output_token_ids
    return _row(int(state.external_req_id), tokens, state.logprobs_processor.logprobs, spans, "abort")


def _row(number: int, tokens: Any, logprobs: Any, spans: list[tuple[int, int]], reason: str) -> FinishedRow:
    chosen: list[float] = [each[token].logprob for token, each in zip(tokens, logprobs or (), strict=True)]
    return FinishedRow.of(number, list(tokens), chosen, spans, reason)
