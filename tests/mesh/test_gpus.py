import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from meshrl.mesh import MachineGpus, machine_gpus, visible_gpus


@pytest.mark.parametrize(
    ("status", "gpus"),
    [
        pytest.param(0, MachineGpus(3, "12.4"), id="as in WSL2, where Linux lists none"),
        pytest.param(9, MachineGpus(0), id="without an answer"),
        pytest.param(None, MachineGpus(0), id="without a driver"),
    ],
)
def test_the_driver_says_how_many_gpus_there_are(
    status: int | None, gpus: MachineGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(value: int, to: Any) -> int:
        to._obj.value = value
        return 0

    def driver(_: str) -> SimpleNamespace:
        if status is None:
            raise OSError("libnvidia-ml.so.1: cannot open shared object file")
        return SimpleNamespace(
            nvmlInit_v2=lambda: status,
            nvmlDeviceGetCount_v2=partial(give, 3),
            nvmlSystemGetCudaDriverVersion_v2=partial(give, 12040),
            nvmlShutdown=lambda: 0,
        )

    monkeypatch.setattr(ctypes, "CDLL", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine_gpus() == gpus
    assert visible_gpus() == [str(number) for number in range(gpus.count)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a,-1")
    assert visible_gpus() == ["GPU-8a"]
