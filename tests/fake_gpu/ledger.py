"""What policies take of a fake GPU, by its ledger, and what `meshrl memory` tells: `python -m tests.fake_gpu.ledger`.

Needs `FAKE_CUDA=memory`, because a model of this size computes too long. Writes the table of docs/gpu.md, or with
`--json` prints the bytes of each setting: told, and taken.
"""

import asyncio
import gc
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import meshrl as rl
from meshrl.engines.processes import ProcessEngine
from meshrl.roles import Workload, memory_of
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.train.fsdp.roles import FsdpPolicy

MIB: Final = 2**20
PAGE: Final = Path(__file__).parents[2] / "docs/gpu.md"
LEDGER: Final = Path(os.environ.get("FAKE_LEDGER", "/dev/shm/fake-cuda-ledger"))  # noqa: S108 -- of all processes
MOST: Final = 64 * 8
"""Where in the ledger the most bytes of the first GPU are. The bytes in use are at its beginning."""
PROMPT: Final = 128
COMPLETION: Final = 384
N: Final = 4
ROWS: Final = 64
SHAPE: Final = Qwen3Config(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, vocab_size=32000, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip
"""That of Qwen3-0.6B, with half of its width and a third of its layers."""
NARROW: Final[Mapping[str, Any]] = {"dtype": "bfloat16"}
RECOMPUTED: Final[Mapping[str, Any]] = {**NARROW, "activation_checkpointing": True}


class Setting(NamedTuple):
    """A policy on its ranks."""

    keys: Mapping[str, Any]
    backend: str = "fsdp"
    axes: Mapping[str, int] = {"dp": 1}

    def config(self, model: str) -> rl.PolicyConfig:
        """Return its table."""
        own = {"backend": self.backend, "model": model, "micro_batch_tokens": 8192}
        return rl.PolicyConfig.model_validate({**own, **self.keys})


BOTH: Final = {"dp": 2}
SETTINGS: Final[Mapping[str, Setting]] = {
    "float32": Setting({}),
    "bfloat16": Setting(NARROW),
    "bfloat16, half of the tokens": Setting({**NARROW, "micro_batch_tokens": 4096}),
    "bfloat16, recomputed": Setting(RECOMPUTED),
    "bfloat16, adapters": Setting({**NARROW, "lora": {"rank": 16}}),
    "bfloat16, `fsdp.cpu_offload`": Setting({**NARROW, "fsdp": {"cpu_offload": True}}),
    "bfloat16, `fsdp.offload_moments`": Setting({**NARROW, "fsdp": {"offload_moments": True}}),
    "bfloat16, recomputed, `fsdp.offload_moments`": Setting({**RECOMPUTED, "fsdp": {"offload_moments": True}}),
    "bfloat16, dp = 2": Setting(NARROW, axes=BOTH),
    "bfloat16, recomputed, dp = 2": Setting(RECOMPUTED, axes=BOTH),
    "bfloat16, tp = 2": Setting(NARROW, axes={"dp": 1, "tp": 2}),
    "Megatron, bfloat16": Setting(NARROW, "megatron"),
    "Megatron, bfloat16, recomputed": Setting(RECOMPUTED, "megatron"),
    "Megatron, bfloat16, half of the tokens": Setting({**NARROW, "micro_batch_tokens": 4096}, "megatron"),
    "Megatron, bfloat16, dp = 2": Setting(NARROW, "megatron", BOTH),
    "Megatron, bfloat16, tp = 2": Setting(NARROW, "megatron", {"dp": 1, "tp": 2}),
    "Megatron, bfloat16, pp = 2": Setting(NARROW, "megatron", {"dp": 1, "pp": 2}),
}


def rollouts(rows: int) -> rl.Batch:
    """Make rows of the longest prompt and completion."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 1000, (rows // N, PROMPT))
    pairs = [np.concatenate([prompts[row // N], rng.integers(2, 1000, COMPLETION)]) for row in range(rows)]
    tokens = rl.Ragged.of(pairs, np.int32)
    return rl.Batch.of(
        tokens=tokens,
        loss_mask=rl.Ragged(np.tile(np.arange(PROMPT + COMPLETION) >= PROMPT, rows), tokens.offsets),
        sampler_logprobs=rl.Ragged(np.full(len(tokens.values), -2.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


def told(setting: Setting, model: str) -> int:
    """Return the bytes that a policy is told to take of the fullest GPU, without CUDA's context."""
    memory = memory_of(setting.config(model), Workload(setting.axes, PROMPT, COMPLETION, ROWS, N, 80 << 30))
    assert memory is not None
    calls: dict[str, int] = {}
    for term in memory.terms:
        if not term.host:
            calls[term.during] = calls.get(term.during, 0) + term.nbytes
    return calls.pop("", 0) + max(calls.values())


class Holds(rl.Actor):
    """Holds a policy on a GPU."""

    @rl.endpoint
    async def taken(self, config: rl.PolicyConfig, rows: int, left: Sequence[int]) -> rl.Gather[np.ndarray]:
        """Return the most bytes of the GPU that were in use at once, in two updates and while weights are published.

        `left`: what killed processes have left of each GPU, which is not counted.
        """
        at = 8 * int(os.environ["CUDA_VISIBLE_DEVICES"])
        gc.collect()  # the policy before
        torch.cuda.empty_cache()
        forget_the_most(at)
        with patch("meshrl_torch.train.fsdp.loading.why_not_packed", return_value=None):  # it reads numbers
            policy = (FsdpPolicy if config.backend == "fsdp" else MegatronPolicy)(config)
        for _ in range(2):
            await policy.update(rollouts(rows), rl.ClippedLoss())
        await policy.weights()
        return np.array([struct.unpack_from("q", LEDGER.read_bytes(), MOST + at)[0] - left[at // 8]])


def forget_the_most(at: int) -> None:
    """Begin to look for the most bytes of a GPU."""
    with LEDGER.open("r+b") as file:  # other processes have it mapped
        file.seek(at)
        now = file.read(8)
        file.seek(MOST + at)
        file.write(now)


async def on_gpus(model: str) -> dict[str, int]:
    """Return what each setting takes of the fullest GPU."""
    found: dict[str, int] = {}
    if not LEDGER.exists():
        LEDGER.write_bytes(bytes(2 * MOST))
    for ranks in sorted({prod(setting.axes.values()) for setting in SETTINGS.values()}):
        engine, left = ProcessEngine(), struct.unpack_from("64q", LEDGER.read_bytes())
        try:
            mesh = await rl.Mesh.reserve(engine, ranks, rl.Resources(cpus=0, gpus=1))
            for name, setting in SETTINGS.items():
                if prod(setting.axes.values()) == ranks:
                    holds = await mesh.shape(**setting.axes).spawn(Holds)
                    found[name] = int(max(await holds.taken(setting.config(model), ROWS // setting.axes["dp"], left)))
        finally:
            await engine.close()
    return found


def measured() -> dict[str, tuple[int, int]]:
    """Return the bytes of each setting: told, and taken."""
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(SHAPE).save_pretrained(folder)
        character_tokenizer("abcdefgh>", 512).save_pretrained(folder)
        taken = asyncio.run(on_gpus(folder))
        return {name: (told(setting, folder), taken[name]) for name, setting in SETTINGS.items()}


def rows(found: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Of the table."""
    yield "| FSDP2, or Megatron-Core | told, MiB | ledger, MiB | apart |"
    yield "|---|---:|---:|---:|"
    for name, (one, other) in found.items():
        yield f"| {name} | {one / MIB:.0f} | {other / MIB:.0f} | {100 * (one / other - 1):+.1f}% |"


if __name__ == "__main__":
    sizes = measured()
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps(sizes))
    else:
        table = "\n".join(rows(sizes))
        text = re.sub(
            r"(?<=<!-- ledger -->\n).*?(?=<!-- /ledger -->)", f"{table}\n", PAGE.read_text("utf-8"), flags=re.DOTALL
        )
        PAGE.write_text(text, "utf-8")
