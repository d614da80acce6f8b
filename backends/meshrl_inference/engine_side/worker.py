"""The engine's process: one loop that takes orders between the engine's steps, and returns rows.

    python -m meshrl_inference.engine_side.worker MODULE FILE_DESCRIPTOR FOLDER

MODULE is a backend's, whose function `start` makes a `protocol.Engine`. FOLDER is for its temporary files. The sampler
removes it, or this process if the sampler was killed. The process needs the engine, torch, transformers, numpy, msgspec
and xxhash, and may run in another environment than meshrl.
"""

import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from meshrl_inference.engine_side.protocol import (
    CACHE,
    WEIGHTS,
    Abort,
    Answer,
    Drop,
    Engine,
    Failed,
    Generate,
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

_ROWS_EVERY: Final = 0.02
"""Seconds between two messages of rows while others are decoded. Reading one takes the sampler a millisecond or two."""


def main() -> None:
    """Serve the sampler at the other end until it is gone."""
    connection = Connection(int(sys.argv[2]))
    # The sampler waits for the end of this process, not for the end of its children.
    os.register_at_fork(after_in_child=connection.close)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    worker: Worker | None = None
    status, gone = 0, False
    try:
        start = to_engine.decode(connection.recv_bytes())
        if isinstance(start, Start):
            engine = import_module(sys.argv[1]).start(start)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # an engine may have set another handler
            worker = Worker(connection, engine, start)
            worker.run()
    except SystemExit:
        pass  # the sampler no longer needs it
    except (EOFError, BrokenPipeError, ConnectionResetError):
        gone = True
    except BaseException as error:  # noqa: BLE001 -- the sampler gets it, whatever it is
        lost = worker and worker.lost
        with suppress(OSError):
            connection.send_bytes(encode(Failed(lost or _described(error))))
        traceback.print_exc()
        status = 1
    if worker is not None:
        worker.close()
    if gone:
        shutil.rmtree(sys.argv[3], ignore_errors=True)
    os._exit(status)  # nothing is left to clean up, and Python's own exit takes a second


class Worker:
    """An engine, and the sampler's orders for it."""

    def __init__(self, connection: Connection, engine: Engine, start: Start) -> None:
        # Imported here, because the engine has set what torch reads at import.
        from meshrl_inference.engine_side import loading  # noqa: PLC0415

        self._connection = connection
        self._sending = threading.Lock()
        self._engine = engine
        self._sleeps = start.sleep
        self._asleep = set[str]()
        """The parts that are not in a GPU's memory."""
        self._fullest = 0.0
        """The highest share of the KV cache in use since the last load."""
        self._swaps = 0
        """Number of times that weights were loaded."""
        self._rows_sent = 0.0
        """Time of the last message of rows."""
        self._loads: deque[tuple[Load, Future[str | None]]] = deque()
        """New weights with their errors: a thread checks them while rows are decoded."""
        self._checker = ThreadPoolExecutor(1)
        naming = loading.Naming(start.model)
        self._refusal = partial(loading.refusal, naming.specs(start.dtype))
        self._adapter_refusal = partial(loading.adapter_refusal, naming.linear, start.dtype)
        if engine.processes:
            threading.Thread(target=self._watch, daemon=True).start()
        self._sleep()
        self._send(Ready(engine.version, engine.tokens))

    def run(self) -> None:
        """Run until the sampler is gone."""
        engine = self._engine
        while True:
            while self._connection.poll(0 if engine.finished or self._loads or engine.decodes else None):
                self._accept(to_engine.decode(self._connection.recv_bytes()))
            self._load_next()
            if engine.decodes:
                engine.step(self._connection)
                self._fullest = max(self._fullest, engine.cache_use)
                self._sleep()  # before the last rows are sent, whose receiver may need the memory
            if engine.finished and (not engine.decodes or time.monotonic() - self._rows_sent > _ROWS_EVERY):
                self._send(Rows(engine.finished))
                engine.finished = []
                self._rows_sent = time.monotonic()

    def close(self) -> None:
        """End the engine's processes, which have nothing to finish."""
        for each in self._engine.processes:
            each.kill()
            each.join()

    @property
    def lost(self) -> str | None:
        """Return which of the engine's processes have died. None if none has."""
        own = self._engine.processes
        # If one has died, an engine may terminate the others.
        died = {at: each for at, each in enumerate(own) if each.exitcode not in (None, 0, -signal.SIGTERM)}
        which = [f"process {each.pid}, at tp={at}, has died ({_how(each.exitcode)})" for at, each in died.items()]
        return f"of the {len(own)} that its matrices are split over, {', '.join(which)}" if which else None

    def _watch(self) -> None:
        """Wait for the death of one of the engine's processes, after which no rows can be decoded."""
        own = self._engine.processes
        multiprocessing.connection.wait([each.sentinel for each in own])
        until = time.monotonic() + 1
        while self.lost is None and time.monotonic() < until:  # the engine itself may be the one that waits for it
            time.sleep(0.01)
        self._send(Failed(self.lost or "one of the engine's own processes has ended"))
        for each in own:
            each.kill()
        os._exit(1)  # this is a thread, and the main one may wait for a row or an order

    def _accept(self, order: Start | Order) -> None:
        if isinstance(order, Generate):
            self._wake(WEIGHTS, CACHE)
            # The salt separates prefixes cached with old weights from new rows.
            self._engine.add(order, str(self._swaps))
        elif isinstance(order, Abort):
            self._engine.abort(order.rows, wanted=order.wanted)
            self._sleep()
        elif isinstance(order, Load):
            check = self._refusal if order.adapter is None else self._adapter_refusal
            self._loads.append((order, self._checker.submit(check, order)))
        elif isinstance(order, Drop):
            self._engine.drop(order.name)

    def _sleep(self) -> None:
        """Free the GPU's memory if nothing is left to decode."""
        if self._sleeps and not self._engine.decodes and CACHE not in self._asleep:
            self._engine.sleep()
            self._asleep = {WEIGHTS, CACHE}

    def _wake(self, *names: str) -> None:
        """Take GPU memory again for these parts."""
        if asleep := [name for name in names if name in self._asleep]:
            self._engine.wake(asleep)
            self._asleep.difference_update(asleep)

    def _load_next(self) -> None:
        """Load the next weights that were checked."""
        if not self._loads:
            return
        order, checked = self._loads[0]
        if checked.done() or not self._engine.decodes:
            self._loads.popleft()
            if (refused := checked.result()) is None:
                self._load(order)
            else:
                self._send(Refused(refused))

    def _load(self, order: Load) -> None:
        """Load new weights and read their probe. Rows that are decoded in between are sent afterwards.

        Until the probe is answered, it is unknown whether they can be trusted.
        """
        began = time.monotonic()
        self._wake(WEIGHTS)
        outcome = self._engine.load(order)
        if not outcome.transport:
            self._send(Refused(outcome.reason, outcome.lost, usable=not outcome.begun))
            return
        self._swaps += 1
        steps, seconds = self._engine.steps, time.monotonic() - began
        logprobs = list[float]()
        if order.probe:
            self._wake(WEIGHTS, CACHE)
            adapter = order.adapter.name if order.adapter else ""
            logprobs = self._engine.read(order.probe, f"probe {self._swaps}", adapter)
            self._sleep()
        read, fullest, self._fullest = np.array(logprobs, np.float32).tobytes(), self._fullest, 0.0
        self._send(Loaded(order.version, steps, seconds, read, outcome.transport, fullest))

    def _send(self, answer: Answer) -> None:
        with self._sending:  # `_watch` is a thread
            self._connection.send_bytes(encode(answer))


def _described(error: BaseException) -> str:
    """Describe an error. Of pydantic's report on an engine's configuration, return only the message."""
    errors: Any = getattr(error, "errors", None)
    if errors is not None:
        return "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in errors())
    return f"{type(error).__name__}: {error}"


def _how(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"


if __name__ == "__main__":
    main()
