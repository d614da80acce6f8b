import ctypes
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.mesh import MachineGpus, machine_gpus, visible_gpus


def answering(status: int) -> SimpleNamespace:
    """A driver of CUDA 12.4 with three GPUs, whose first call returns `status`."""

    def give(value: int, to: Any) -> int:
        to._obj.value = value
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: status,
        nvmlDeviceGetCount_v2=partial(give, 3),
        nvmlSystemGetCudaDriverVersion_v2=partial(give, 12040),
        nvmlShutdown=lambda: 0,
    )


def missing(_: str) -> SimpleNamespace:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


@pytest.mark.parametrize(
    ("library", "gpus"),
    [
        pytest.param(lambda _: answering(0), MachineGpus(3, "12.4"), id="as in WSL2, where Linux lists none"),
        pytest.param(lambda _: answering(9), MachineGpus(0), id="without an answer"),
        pytest.param(missing, MachineGpus(0), id="without a driver"),
    ],
)
def test_the_driver_says_how_many_gpus_there_are(
    library: Callable[[str], SimpleNamespace], gpus: MachineGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine_gpus() == gpus
    assert visible_gpus() == [str(number) for number in range(gpus.count)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a,-1")
    assert visible_gpus() == ["GPU-8a"]
