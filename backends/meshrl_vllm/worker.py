"""The engine's process: one loop that takes orders between vLLM's steps, and tells which rows have left.

    python -m meshrl_vllm.worker FILE_DESCRIPTOR

It needs vLLM and msgspec alone: it may run in another environment than meshrl does.
"""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import numpy as np

from meshrl_vllm.arrival import logprobs, wrong
from meshrl_vllm.messages import (
    Answer,
    Done,
    Failed,
    Generate,
    Leave,
    Load,
    Loaded,
    Order,
    Ready,
    Refused,
    Rows,
    Start,
    encode,
    to_engine,
)

_CPU_CACHE_MIB: Final = 512
"""Of keys and values, on a CPU, where nothing is said."""
_CPU_READS: Final = 4096
"""Tokens read in one step, at most, on a CPU."""
_HELD: Final = 8
"""Steps between two messages of rows while others are decoded: to read one costs the sampler a millisecond or two."""
_PROBE: Final = "probe "
"""What the names of requests begin with that read one."""
PROBES: Final = 8
"""The most sequences of a probe."""
_WEIGHTS: Final = "weights"
_CACHE: Final = "kv_cache"
"""What vLLM calls the two that hold a GPU's memory."""


def main() -> None:
    """Serve the sampler at the other end until it is gone."""
    connection = Connection(int(sys.argv[1]))
    # The sampler is to see the end of this process, and of none that it makes.
    os.register_at_fork(after_in_child=connection.close)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    worker: Worker | None = None
    status = 0
    try:
        start = to_engine.decode(connection.recv_bytes())
        if isinstance(start, Start):
            worker = Worker(connection, start)
            worker.run()
    except (EOFError, BrokenPipeError, ConnectionResetError, SystemExit):
        pass  # the sampler is gone, or has no use for this any more
    except BaseException as error:  # noqa: BLE001 -- whatever it is, it is the sampler's to see
        lost = worker and worker.lost
        with suppress(OSError):
            connection.send_bytes(encode(Failed(lost or _words(error))))
        traceback.print_exc()
        status = 1
    if worker is not None:
        worker.close()
    os._exit(status)  # there is nothing to tidy up, and Python's own end takes a second


class Worker:
    """The engine, and the rows that it decodes."""

    def __init__(self, connection: Connection, start: Start) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._sleeps = start.sleep
        self._swaps = 0
        """How often new weights were taken."""
        self._steps = 0
        self._left: list[Done] = []
        """Rows to be told."""
        self._loads: deque[tuple[Load, Future[str | None]]] = deque()
        """New weights, and what is wrong with them: read in a thread, while rows are decoded."""
        self._reader = ThreadPoolExecutor(1)
        self._loaded: Loaded | None = None
        """What is to be said of new weights when their probe is read."""
        self._unread: dict[str, list[float]] = {}
        """The log-probs of a probe's sequences, by the requests that read them; empty of those that are not read."""
        self._slots = start.slots
        self._engine = _engine(start)
        import vllm  # noqa: PLC0415 -- after `_engine` has set its environment

        from meshrl_vllm.naming import Naming  # noqa: PLC0415

        self._known = Naming(start.model).held(start.dtype)
        self._vllm = vllm
        self._engine.set_weight_version("0")
        self._seats(0)
        self._executor.register_failure_callback(self._end)
        self._rest()
        self._send(Ready(vllm.__version__, self._engine.model_config.get_vocab_size()))

    def run(self) -> None:
        """Until the sampler is gone."""
        while True:
            while self._connection.poll(0 if self._busy else None):
                self._take(to_engine.decode(self._connection.recv_bytes()))
            self._load_next()
            if self._decodes:
                self._step()
            if answer := self._answered():
                self._send(answer)
            # Until a probe is answered nobody knows whether what was drawn may be trusted.
            if self._left and self._loaded is None and (self._steps % _HELD == 0 or not self._decodes):
                self._send(Rows(self._left))
                self._left = []

    def close(self) -> None:
        """End the engine's own processes: they have nothing to finish."""
        for each in self._own:
            each.kill()
            each.join()

    @property
    def lost(self) -> str | None:
        """Which of the engine's own processes have died; None where none has."""
        # Where one has died, vLLM terminates the others.
        died = {at: each for at, each in enumerate(self._own) if each.exitcode not in (None, 0, -signal.SIGTERM)}
        told = [f"process {each.pid}, at tp={at}, has died ({_how(each.exitcode)})" for at, each in died.items()]
        return f"of the {len(self._own)} that its matrices are split over, {', '.join(told)}" if told else None

    def _end(self) -> None:
        """One of the engine's own processes has died: the rows, and those that come, can be decoded no more."""
        self._send(Failed(self.lost or "one of the engine's own processes has ended"))
        os._exit(1)  # this is a thread of vLLM's, and the main one may wait for a row or an order

    @property
    def _own(self) -> list[Any]:
        """The engine's own processes, one for each place along tp; none where there is one place."""
        return [handle.proc for handle in getattr(self._executor, "workers", ())]

    @property
    def _executor(self) -> Any:
        return self._engine.engine_core.engine_core.model_executor

    @property
    def _decodes(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    @property
    def _busy(self) -> bool:
        return bool(self._left or self._loads or self._loaded) or self._decodes

    def _step(self) -> None:
        for output in self._engine.step():
            if not output.finished:
                continue
            if output.request_id in self._unread:
                self._unread[output.request_id] = logprobs(output)
            else:
                self._left.append(_done(output))
        self._steps += 1
        self._rest()  # before the last rows are told: who has them may want the memory

    def _take(self, order: Start | Order) -> None:
        if isinstance(order, Generate):
            self._generate(order)
        elif isinstance(order, Leave):
            self._leave(order)
        elif isinstance(order, Load):
            self._loads.append((order, self._reader.submit(wrong, order, self._known)))

    def _rest(self) -> None:
        """Give the GPU's memory back where nothing is left to decode."""
        if self._sleeps and _CACHE not in self._executor.sleeping_tags and not self._decodes:
            self._engine.sleep(level=1)  # the weights go to the host's memory

    def _wake(self, *tags: str) -> None:
        """Take the GPU's memory again for what these name."""
        if asleep := [tag for tag in tags if tag in self._executor.sleeping_tags]:
            self._engine.wake_up(asleep)

    def _generate(self, order: Generate) -> None:
        self._wake(_WEIGHTS, _CACHE)
        for row in order.rows:
            sampling = self._vllm.SamplingParams(
                temperature=order.temperature,
                top_p=order.top_p,
                top_k=order.top_k,
                seed=row.seed,
                max_tokens=row.max_tokens,
                ignore_eos=True,  # the ends are ours
                stop_token_ids=order.ends,
                stop=order.stop or None,
                detokenize=bool(order.stop),
                logprobs=0,
                output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            )
            tokens = np.frombuffer(row.tokens, np.int32).tolist()
            # The salt keeps what old weights made of a prompt from rows that begin under new ones.
            prompt = {"prompt_token_ids": tokens, "cache_salt": str(self._swaps)}
            self._engine.add_request(str(row.number), prompt, sampling)

    def _leave(self, order: Leave) -> None:
        processor = self._engine.output_processor
        states = {state.external_req_id: state for state in processor.request_states.values()}
        here = [states[str(number)] for number in order.rows if str(number) in states]
        if order.told:
            self._left += [_unfinished(state) for state in here]
        self._engine.abort_request([str(state.external_req_id) for state in here])
        self._rest()

    def _load_next(self) -> None:
        """Take the next weights that have been read, when the probe of those before is."""
        if not self._loads or self._loaded is not None:
            return
        order, read = self._loads[0]
        if read.done() or not self._decodes:
            self._loads.popleft()
            if (refused := read.result()) is None:
                self._load(order)
            else:
                self._send(Refused(refused))

    def _load(self, order: Load) -> None:
        began = time.monotonic()
        self._wake(_WEIGHTS)
        engine = self._engine
        core = engine.engine_core.engine_core
        core.pause_scheduler(mode="keep", clear_cache=False)
        buckets = [
            (bucket.path, [(part.name, part.dtype, part.shape, part.start) for part in bucket.parts])
            for bucket in order.buckets
        ]
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", kwargs={"update_info": {"buckets": buckets}})
        engine.collective_rpc("finish_weight_update")
        engine.set_weight_version(str(order.version))
        if order.recompute:
            engine.reset_prefix_cache(reset_running_requests=True)
        core.resume_scheduler()
        self._swaps += 1
        self._loaded = Loaded(order.version, self._steps, time.monotonic() - began, b"")
        self._ask(order.probe)

    def _ask(self, probe: list[list[int]]) -> None:
        """Let the engine read a probe, before all rows that wait, in seats of its own."""
        if probe:
            self._wake(_WEIGHTS, _CACHE)
        self._seats(len(probe))
        self._unread = {f"{_PROBE}{number}": [] for number in range(len(probe))}
        for name, tokens in zip(self._unread, probe, strict=True):
            reading = self._vllm.SamplingParams(
                max_tokens=1,
                temperature=0,
                prompt_logprobs=0,
                detokenize=False,
                output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": tokens, "cache_salt": f"{name} {self._swaps}"}
            self._engine.add_request(name, prompt, reading, priority=-1)

    def _answered(self) -> Loaded | None:
        """What new weights make of their probe, when all of it is read."""
        if self._loaded is None or not all(self._unread.values()):
            return None
        values = np.array([value for row in self._unread.values() for value in row], np.float32)
        answer = msgspec.structs.replace(self._loaded, logprobs=values.tobytes())
        self._loaded, self._unread = None, {}
        self._seats(0)
        return answer

    def _seats(self, extra: int) -> None:
        """How many rows may be decoded at once, beside the slots."""
        self._engine.engine_core.engine_core.scheduler.max_num_active_reqs = self._slots + extra

    def _send(self, answer: Answer) -> None:
        with self._sending:  # `_end` is called by a thread of vLLM's
            self._connection.send_bytes(encode(answer))


def _words(error: BaseException) -> str:
    """What went wrong; of what pydantic says of vLLM's configuration, the sentence alone."""
    errors: Any = getattr(error, "errors", None)
    if errors is not None:
        return "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in errors())
    return f"{type(error).__name__}: {error}"


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _engine(start: Start) -> Any:
    # Before vLLM is imported, which reads these.
    os.environ.update(OMP_NUM_THREADS=str(start.threads), VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "0"  # they have nothing to finish
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # a rank is granted a number of cores, not these and those
    if start.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(start.gpus)
    from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 -- as above
    from vllm.config.weight_transfer import WeightTransferConfig  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    from meshrl_vllm import transfer  # noqa: PLC0415

    cpu = current_platform.is_cpu()
    if cpu:
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    cache = start.kv_cache_mib or (_CPU_CACHE_MIB if cpu else None)
    arguments = EngineArgs(
        model=start.model,
        dtype=start.dtype,
        max_model_len=start.max_tokens,
        max_num_seqs=start.slots + PROBES,
        # A row that is read in parts takes its seed's random numbers back, which generators on CPUs cannot.
        enable_chunked_prefill=False if cpu else None,
        max_num_batched_tokens=max(_CPU_READS, start.max_tokens) if cpu else None,
        scheduling_policy="priority",
        async_scheduling=False,  # else a step of the old weights would end after a load, under the new version
        tensor_parallel_size=start.tp,
        distributed_executor_backend="mp" if start.tp > 1 else None,
        enforce_eager=start.eager or cpu,
        enable_sleep_mode=start.sleep and not cpu,  # on a CPU vLLM sleeps and wakes, and frees nothing
        kv_cache_memory_bytes=None if cache is None else cache << 20,
        gpu_memory_utilization=start.memory_share,
        logprobs_mode="processed_logprobs",  # at the temperature, where raw ones are before it
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=transfer.NAME),
        worker_extension_cls=f"{transfer.__name__}.{transfer.Extension.__name__}",
    )
    engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    engine.collective_rpc("tell_whole")
    return engine


def _done(output: Any) -> Done:
    """What vLLM says of a row that has ended."""
    (one,) = output.outputs
    spans = [(int(span.version), span.start) for span in one.weight_versions or ()]
    return _row(int(output.request_id), one.token_ids, one.logprobs, spans, one.finish_reason)


def _unfinished(state: Any) -> Done:
    """What vLLM has of a row so far."""
    spans = [(int(version), start) for version, start in state.weight_version_starts]
    tokens = state.detokenizer.output_token_ids
    return _row(int(state.external_req_id), tokens, state.logprobs_processor.logprobs, spans, "abort")


def _row(number: int, tokens: Any, logprobs: Any, spans: list[tuple[int, int]], reason: str) -> Done:
    chosen = [each[token].logprob for token, each in zip(tokens, logprobs or (), strict=True)]
    drawn, values = np.array(list(tokens), np.int32), np.array(chosen, np.float32)
    return Done(number, drawn.tobytes(), values.tobytes(), spans, reason)


if __name__ == "__main__":
    main()
