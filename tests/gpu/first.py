"""The first run on a real GPU, in 15 minutes: `make first-gpu` or `python -m tests.gpu.first [PART...]`.

Each part is a command with a limit. All that it printed, and the most memory of each GPU meanwhile, go to one file,
`runs/first-gpu.json`, after each part. Parts that have passed there are left out, unless they are named. On the GPUs of
`make fake-cuda` the file is another one, and says of each part what it cannot have shown.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from string import ascii_letters
from typing import Any, Final, NamedTuple

FOLDER: Final = Path("runs")


_KEPT: Final = 20_000
"""Last characters of a part's output that are kept."""
_PYTHON: Final = [sys.executable]
_RUN: Final = [*_PYTHON, "-c", "from meshrl.cli import main; main()", "run"]
_SMALL: Final = [
    "steps=3", "run.meshes.main.ranks=1", "run.meshes.main.gpus=1",
    f'policy.model={{characters="{ascii_letters}>", hidden_size=256, layers=4, heads=4, max_tokens=48}}',
]  # fmt: skip
_VLLM: Final = ".venv-vllm/bin/python"
_TIMES: Final = "times"
_SLOWER: Final = 10
"""Limits are so many times as long on fake GPUs, which compute on the CPU."""


class Part(NamedTuple):
    """A command."""

    seconds: float
    """It is ended after these."""
    command: list[str]
    real: str
    """What only a real GPU shows of it."""
    needs: tuple[str, ...] = ()
    """Paths without which it is left out."""

    def run(self, gpus: "Gpus") -> dict[str, Any]:
        """Run it, and return what happened."""
        if missing := [path for path in self.needs if not Path(path).exists()]:
            return {"outcome": f"left out: there is no {', '.join(missing)}"}
        began, memory = time.monotonic(), Memory(gpus)
        limit = self.seconds * _SLOWER if gpus.fake else self.seconds
        with subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                told, outcome = process.communicate(timeout=limit)[0], ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                told, outcome = _rest(process), f"ended after {limit:g} s"
        failed = f"failed with status {process.returncode}" if process.returncode else "passed"
        return {
            "outcome": outcome or failed,
            "seconds": round(time.monotonic() - began, 1),
            "most_mib": memory.end(),
            "printed": told[-_KEPT:],
        }


def _rest(process: "subprocess.Popen[str]") -> str:
    """What it still prints, unless a process of another session holds its output open."""
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired as error:
        return str(error.stdout or "")


class Gpus:
    """The machine's GPUs, by NVML: CUDA would take some of their memory itself."""

    def __init__(self) -> None:
        self._nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
        self._nvml.nvmlInit_v2()
        self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        self.count: Final = count.value
        self.names: Final = [self._name(index) for index in range(self.count)]

    @property
    def fake(self) -> bool:
        """True if they are those of `make fake-cuda`."""
        return "Fake GPU" in self.names

    def _device(self, index: int) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        return device

    def _name(self, index: int) -> str:
        name = ctypes.create_string_buffer(96)
        self._nvml.nvmlDeviceGetName(self._device(index), name, len(name))
        return name.value.decode()

    def used(self, index: int) -> int:
        """Return the MiB in use on a GPU, by all processes."""
        sizes = (ctypes.c_ulonglong * 3)()
        self._nvml.nvmlDeviceGetMemoryInfo(self._device(index), sizes)  # all, free, used
        return sizes[2] >> 20


class Memory:
    """The most memory in use on each GPU, sampled in a thread."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus, self._most = gpus, dict[int, int]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while True:
            for index in range(self._gpus.count):
                self._most[index] = max(self._most.get(index, 0), self._gpus.used(index))
            if self._ended.wait(0.2):
                return

    def end(self) -> Mapping[int, int]:
        """Return the most MiB by number of the GPU."""
        self._ended.set()
        self._thread.join()
        return self._most


def parts() -> dict[str, Part]:
    """Return all parts, in order."""
    small = [*_RUN, "grpo/quickstart-fsdp", *_SMALL]
    recipe = [*_RUN, "grpo/qwen3-0.6b-1gpu", "steps=3", "evaluation.every=1000"]
    tests = [*_PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    own = [*_PYTHON, "-m", "tests.gpu.first_parts"]
    with_model = (_VLLM, "Qwen/Qwen3-0.6B")
    whole = "vLLM's kernels, its graphs, and memory of contexts"
    return {
        "devices": Part(20, [*own, "devices"], "the driver"),
        "tests": Part(90, tests, "what kernels round, and Triton compiles"),
        "fsdp": Part(50, [*small, "run.name=first-gpu-fsdp"], _TIMES),
        "megatron": Part(50, [*small, "policy.backend=megatron", "run.name=first-gpu-megatron"], _TIMES),
        "colocated": Part(240, [*recipe, "run.name=first-gpu-broadcast"], whole, with_model),
        "copies": Part(120, [*recipe, "policy.weight_sync=auto", "run.name=first-gpu-copies"], whole, with_model),
        "update": Part(60, [*own, "update"], "tokens a second"),
        "compiled update": Part(90, [*own, "update", "compile"], "tokens a second"),
        "profile": Part(60, [*own, "profile"], "the GPU's share of the time"),
        "engine killed": Part(90, [*own, "deaths"], "what a driver does after a kill", (_VLLM,)),
    }


def main() -> None:
    """Run the parts that are named, or all that have not passed. Ends with 1 if one has failed."""
    known, gpus = parts(), Gpus()
    file = FOLDER / ("first-gpu-fake.json" if gpus.fake else "first-gpu.json")
    written: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    written["gpus"] = gpus.names
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [name for name in known if written.get(name, {}).get("outcome") != "passed"]:
        written[name] = known[name].run(gpus)
        if gpus.fake:
            written[name]["not_shown"] = f"{known[name].real}: these GPUs are fake"
        file.write_text(json.dumps(written, indent=1), "utf-8")
        print(f"{name}: {written[name]['outcome']}{' on fake GPUs' * gpus.fake}", flush=True)
    ran = [written[name] for name in known if name in written]
    sys.exit(any(each["outcome"].startswith(("failed", "ended")) for each in ran))


if __name__ == "__main__":
    main()
