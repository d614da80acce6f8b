"""The first run on a real GPU, in 15 minutes: `make first-gpu` or `python -m tests.gpu.first [PART...]`.

Each part is a command with a limit. All that it printed, and the most memory of each GPU meanwhile, go to one file,
`runs/first-gpu.json`, after each part. Parts that have passed there are left out, unless they are named. The file says
which GPUs the machine has: those of `make fake-cuda` are named "Fake GPU".
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
from typing import Any, Final, NamedTuple

FILE: Final = Path("runs/first-gpu.json")
_KEPT: Final = 20_000
"""Last characters of a part's output that are kept."""
_PYTHON: Final = [sys.executable]
_RUN: Final = [*_PYTHON, "-c", "from meshrl.cli import main; main()", "run"]
_SMALL: Final = [
    "steps=3", "run.meshes.main.ranks=1", "run.meshes.main.gpus=1",
    'policy.model={characters="abcdefghijklmnopqrstuvwxyz>", hidden_size=256, layers=4, heads=4, max_tokens=48}',
]  # fmt: skip
_VLLM: Final = ".venv-vllm/bin/python"


class Part(NamedTuple):
    """A command."""

    seconds: float
    """It is ended after these."""
    command: list[str]
    needs: tuple[str, ...] = ()
    """Paths without which it is left out."""

    def run(self) -> dict[str, Any]:
        """Run it, and return what happened."""
        if missing := [path for path in self.needs if not Path(path).exists()]:
            return {"outcome": f"left out: there is no {', '.join(missing)}"}
        began, memory = time.monotonic(), Memory()
        with subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            try:
                told, outcome = process.communicate(timeout=self.seconds)[0], ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                told, outcome = _rest(process), f"ended after {self.seconds:g} s"
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


class Memory:
    """The most memory in use on each GPU, sampled in a thread, by NVML: CUDA would take some itself."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
        nvml.nvmlInit_v2()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        while True:
            for index in range(count.value):
                device, sizes = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
                nvml.nvmlDeviceGetMemoryInfo(device, sizes)  # all, free, used
                self._most[index] = max(self._most.get(index, 0), sizes[2] >> 20)
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
    own = [*_PYTHON, "-m", "tests.gpu.first_parts"]
    with_model = (_VLLM, "Qwen/Qwen3-0.6B")
    return {
        "devices": Part(30, [*own, "devices"]),
        "tests": Part(120, [*_PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"]),
        "fsdp": Part(60, [*small, "run.name=first-gpu-fsdp"]),
        "megatron": Part(60, [*small, "policy.backend=megatron", "run.name=first-gpu-megatron"]),
        "colocated": Part(240, [*recipe, "run.name=first-gpu-broadcast"], with_model),
        "copies": Part(150, [*recipe, "policy.weight_sync=auto", "run.name=first-gpu-copies"], with_model),
        "update": Part(90, [*own, "update"]),
        "compiled update": Part(120, [*own, "update", "compile"]),
        "profile": Part(60, [*own, "profile"]),
        "engine killed": Part(120, [*own, "deaths"], (_VLLM,)),
    }


def main() -> None:
    """Run the parts that are named, or all that have not passed. Ends with 1 if one has failed."""
    known = parts()
    written: dict[str, Any] = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    FILE.parent.mkdir(exist_ok=True)
    for name in sys.argv[1:] or [name for name in known if written.get(name, {}).get("outcome") != "passed"]:
        written[name] = known[name].run()
        FILE.write_text(json.dumps(written, indent=1), "utf-8")
        print(f"{name}: {written[name]['outcome']}", flush=True)
    sys.exit(any(each["outcome"].startswith(("failed", "ended")) for each in written.values()))


if __name__ == "__main__":
    main()
