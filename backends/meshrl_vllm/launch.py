"""The server's process: vLLM's server with the settings that this machine needs.

    python -m meshrl_vllm.launch OPTION...

The options are those of vLLM's server. The first line of the standard input is the key of `guard.Guard`. The process
ends with that input. It needs only vLLM.
"""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false

import os
import runpy
import signal
import sys
import threading
from typing import Final

from meshrl_vllm import guard

_CACHE: Final = "--kv-cache-memory-bytes"
_CPU_CACHE_BYTES: Final = 512 << 20
"""Size of the KV cache on a CPU."""


def main() -> None:
    """Serve until the parent is gone."""
    # Not a variable or an option, because child processes inherit variables, and everybody sees options.
    if key := sys.stdin.buffer.readline().decode().strip():
        guard.keys.append(key)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Before the import of vLLM, which reads these.
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    try:
        from vllm.platforms import current_platform  # noqa: PLC0415 -- as above
    except ModuleNotFoundError as error:
        sys.exit(f"{sys.executable} has no vLLM: {error}")

    options: list[str] = []
    if current_platform.is_cpu():
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        # A seeded request whose prompt is read in two steps crashes vLLM: its generator cannot step back.
        options += ["--enforce-eager", "--no-enable-chunked-prefill"]
        if _CACHE not in sys.argv:
            options += [_CACHE, str(_CPU_CACHE_BYTES)]
    sys.argv += options
    # Not the command `vllm`, which builds for CPUs lack.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
