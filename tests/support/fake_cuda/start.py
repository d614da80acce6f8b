"""What each Python of `.venv-fake-cuda` does first: once torch is imported, its fake GPUs compute.

`FAKE_CUDA=memory` leaves kernels that do nothing: then untouched memory costs nothing, and models of any size fit.
"""

import os
import sys
from collections.abc import Sequence
from ctypes import CDLL, RTLD_GLOBAL
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

LIBRARIES = Path(str(getattr(find_spec("torch"), "origin", ""))).parents[1] / "nvidia/cu13/lib"


class _AfterTorch(MetaPathFinder):
    """Runs `numbers.begin` after torch has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_begin(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                execute(module)
                from tests.support.fake_cuda import numbers  # noqa: PLC0415 -- it needs torch

                numbers.begin()
                if find_spec("vllm") is not None:
                    from tests.support.fake_cuda import vllm_numbers  # noqa: PLC0415 -- as above

                    vllm_numbers.begin()

            spec.loader.exec_module = execute_and_begin  # type: ignore[method-assign]
        return spec


for name in ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"):  # found by their names from then on
    CDLL(str(LIBRARIES / name), RTLD_GLOBAL)
os.environ.setdefault("TRITON_LIBCUDA_PATH", str(LIBRARIES))
if os.environ.get("FAKE_CUDA") != "memory":
    sys.meta_path.insert(0, _AfterTorch())
