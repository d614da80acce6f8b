"""Parts of `tests.gpu.first` that are no command of meshrl: `python -m tests.gpu.first_parts PART`."""

import asyncio
import os
import signal
import sys
import time
from typing import Final

import numpy as np
import torch

import meshrl as rl
from meshrl.mesh import machine_gpus
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.wire import nccl

MODEL: Final = rl.NewModel(
    characters="".join(map(chr, range(0x4E00, 0x4E00 + 8000))),
    hidden_size=512, ffn_size=1408, layers=6, heads=8, max_tokens=1024,
)  # fmt: skip


def devices() -> None:
    """Print what the machine has."""
    print("driver", machine_gpus(), "torch", torch.__version__, "NCCL", nccl.release())
    for index in range(torch.cuda.device_count()):
        print(torch.cuda.get_device_properties(index))


def _batch(rows: int, prompt: int = 64, completion: int = 192) -> rl.Batch:
    rng = np.random.default_rng(0)
    tokens = rl.Ragged.of(list(rng.integers(2, 8000, (rows, prompt + completion))), np.int32)
    return rl.Batch.of(
        tokens=tokens,
        loss_mask=rl.Ragged(np.tile(np.arange(prompt + completion) >= prompt, rows), tokens.offsets),
        sampler_logprobs=rl.Ragged(np.full(len(tokens.values), -9.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


def _policy(*, compiled: bool = False) -> FsdpPolicy:
    keys = {"backend": "fsdp", "model": MODEL, "dtype": "bfloat16", "micro_batch_tokens": 4096}
    return FsdpPolicy(rl.PolicyConfig.model_validate({**keys, "fsdp": {"compile": compiled}}))


def update(*, compiled: bool) -> None:
    """Print tokens a second of updates, and what they leave on the GPU."""
    policy, batch = _policy(compiled=compiled), _batch(32)
    for step in range(3):
        began = time.monotonic()
        told = asyncio.run(policy.update(batch, rl.ClippedLoss())).means()
        torch.cuda.synchronize()
        rate = len(batch.tokens.values) / (time.monotonic() - began)
        mib = [each >> 20 for each in (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())]
        print(f"step {step}: {rate:.0f} tokens/s, loss {told['loss']:.6f}, allocated {mib[0]}, reserved {mib[1]} MiB")


def profile() -> None:
    """Print where an update spends the GPU's time."""
    policy, batch = _policy(), _batch(32)
    asyncio.run(policy.update(batch, rl.ClippedLoss()))
    with torch.profiler.profile() as profiled:
        asyncio.run(policy.update(batch, rl.ClippedLoss()))
    print(profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=25))


async def deaths() -> None:
    """Kill vLLM's engine while it draws and before it loads, and go on with another."""
    config = rl.SamplerConfig.model_validate(
        {
            "backend": "vllm",
            "model": MODEL,
            "slots": 16,
            "vllm": {"python": ".venv-vllm/bin/python", "memory_share": 0.3},
        }
    )
    from meshrl_vllm.sampler import VllmSampler  # noqa: PLC0415 -- its environment may be missing

    weights = await _policy().weights()
    for load in (False, True):
        sampler = VllmSampler(config)
        calls = [sampler.load(weights) if load else _drawn(sampler)]
        waiting = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)
        os.kill(sampler.engine_pid, signal.SIGKILL)
        (found,) = await asyncio.wait_for(waiting, 30)
        assert isinstance(found, rl.errors.MeshrlError), found
        print("killed while it", "loads:" if load else "draws:", found)
    again = VllmSampler(config)
    await again.load(weights)
    print("drawn", len(await _drawn(again)))


async def _drawn(sampler: rl.Sampler) -> rl.Batch:
    prompts = rl.Batch.of(prompt=[MODEL.characters[number : number + 8] for number in range(16)])
    return await rl.rollout(sampler, prompts, rl.Sampling(max_tokens=256, ignore_eos=True))


if __name__ == "__main__":
    part = sys.argv[1]
    if part == "update":
        update(compiled="compile" in sys.argv)
    elif part == "deaths":
        asyncio.run(deaths())
    else:
        {"devices": devices, "profile": profile}[part]()
