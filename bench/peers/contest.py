"""What contestants of every environment share: questions on standard input, answers, and the memory they took."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path


class Memory:
    """How far this process's own memory rises, at its peak, from when this was made.

    Shared pages (those of an object store that it maps) are not counted.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak, `VmHWM`, starts again from here
        self._start = _status()

    def grown(self) -> float:
        """MiB."""
        now = _status()
        return (now["VmHWM"] - self._start["VmRSS"] - (now["RssShmem"] - self._start["RssShmem"])) / 1024


def start_ray(store: int) -> None:
    """A Ray of this process's own, with room for all its actors. `store`: the bytes of its object store."""
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
    """Do what each line asks, {"do": method, ...}, and print the method's result and the memory it took."""
    print('{"ready": true}', flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        memory = Memory()
        value = methods[question.pop("do")](**question)
        print(json.dumps({"value": value, "memory": memory.grown()}), flush=True)
