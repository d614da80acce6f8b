"""Shared code of contestants in every environment: questions on standard input, answers, and memory."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


class Memory:
    """Growth of this process's own memory since this was made, at its peak.

    Shared pages, such as those of a mapped object store, are not counted.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak, `VmHWM`
        self._start = _status()

    def grown(self) -> float:
        """Growth in MiB."""
        now = _status()
        return (now["VmHWM"] - self._start["VmRSS"] - (now["RssShmem"] - self._start["RssShmem"])) / 1024


def start_ray(store: int) -> None:
    """Start a private Ray with room for all actors. `store`: bytes of its object store."""
    import ray  # noqa: PLC0415 -- not every contestant has it

    ray.init(
        "local",
        num_cpus=8,
        object_store_memory=store,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.startswith(("Vm", "Rss")))
    return {name: int(value.split()[0]) for name, value in pairs}


def answer(methods: Mapping[str, Callable[..., float]]) -> None:
    """Answer each line, {"do": method, ...}, with the method's result and the memory it took."""
    print('{"ready": true}', flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        memory = Memory()
        value = methods[question.pop("do")](**question)
        print(json.dumps({"value": value, "memory": memory.grown()}), flush=True)
