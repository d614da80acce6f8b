"""Which GPUs ranks get, and that processes which were forked can use them."""

import os

import pytest
import torch

from meshrl import Actor, Mesh, Resources, each, endpoint
from meshrl.engines.processes import ProcessEngine
from meshrl.errors import ConfigError
from meshrl.mesh import MachineGpus, Same, machine_gpus

PRELOADED = [
    "meshrl_torch.train.one_rank",
    "meshrl_torch.train.fsdp.roles",
    "meshrl_megatron.roles",
    "meshrl_vllm.sampler",
    "meshrl_sglang.sampler",
]


class Computes(Actor):
    @endpoint
    async def adds(self) -> Same[tuple[float, str]]:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        return float((torch.ones(3, device=device) + 1).sum()), os.environ["CUDA_VISIBLE_DEVICES"]


async def test_forked_ranks_compute_on_gpus_whatever_was_imported_before() -> None:
    """Megatron-Core asks at its import if there is CUDA. The machine lists its GPUs nowhere but in NVML."""
    assert machine_gpus() == MachineGpus(2, "13.0")
    engine = ProcessEngine(PRELOADED)
    try:
        mesh = await Mesh.reserve(engine, 2, Resources(cpus=0, gpus=1))
        assert await each((await mesh.spawn(Computes)).adds)() == [(6.0, "0"), (6.0, "1")]
        with pytest.raises(ConfigError, match="0 of GPU 0, 0 of GPU 1"):
            await Mesh.reserve(engine, 1, Resources(gpus=1))
    finally:
        await engine.close()
