"""The GPUs of this machine, found without CUDA, whose runtime refuses forks once it was asked."""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_LISTED: Final = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class MachineGpus:
    """The GPUs of a machine."""

    count: int
    """Those of a container, if this is one."""
    driver: str = ""
    """The newest CUDA version that the driver supports. Empty if unknown."""


def machine_gpus() -> MachineGpus:
    """Ask the driver's library NVML. If it does not answer, count the GPUs that Linux lists."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count, version = ctypes.c_uint(), ctypes.c_int()
        if not (nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))):
            nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
            nvml.nvmlShutdown()
            return MachineGpus(count.value, f"{version.value // 1000}.{version.value % 1000 // 10}")
    except (OSError, AttributeError):
        pass  # there is no driver, or one that is older than these functions
    return MachineGpus(len(list(_LISTED.iterdir())) if _LISTED.is_dir() else 0)


@cache
def gpu_name() -> str:
    """Return the product name of the first GPU, such as `NVIDIA H200`, by NVML. Empty if there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2():
            return ""
        found = not (
            nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) or nvml.nvmlDeviceGetName(device, name, 96)
        )
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return ""
    return name.value.decode(errors="replace") if found else ""


def visible_gpus() -> list[str]:
    """Return CUDA's names of the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or else all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return [str(number) for number in range(machine_gpus().count)]
