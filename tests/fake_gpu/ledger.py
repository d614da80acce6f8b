"""What policies take of fake GPUs, by the ledger, and what `meshrl memory` tells: `python -m tests.fake_gpu.ledger`.

Needs `FAKE_CUDA=memory`, because a model of this size computes too long. Writes the table of docs/gpu.md, or with
`--json` prints the bytes of each setting: told, and taken.
"""

import asyncio
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
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
PROMPT: Final = 128
COMPLETION: Final = 384
N: Final = 4
SHAPE: Final = Qwen3Config(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, vocab_size=32000, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip
"""That of Qwen3-0.6B, with half of its width and a third of its layers."""


class Unchecked(FsdpPolicy):
    """Without the check that packed rows do not see each other, which needs numbers."""

    def __init__(self, config: rl.PolicyConfig) -> None:
        with patch("meshrl_torch.train.fsdp.loading.check_packing"):
            super().__init__(config)


class Setting(NamedTuple):
    """A policy on GPUs."""

    ranks: int
    keys: dict[str, Any]
    axes: dict[str, int] = {}  # noqa: RUF012 -- never changed


SETTINGS: Final = {
    "float32": Setting(1, {}),
    "bfloat16": Setting(1, {"dtype": "bfloat16"}),
    "bfloat16, recomputed, 2 ranks": Setting(2, {"dtype": "bfloat16", "activation_checkpointing": True}),
    "bfloat16, adapters": Setting(1, {"dtype": "bfloat16", "lora": {"rank": 16}}),
    "bfloat16, parameters in the host": Setting(1, {"dtype": "bfloat16", "fsdp": {"cpu_offload": True}}),
    "bfloat16, recomputed, moments in the host": Setting(
        1, {"dtype": "bfloat16", "activation_checkpointing": True, "fsdp": {"offload_moments": True}}
    ),
    "bfloat16, 2 ranks along tp": Setting(2, {"dtype": "bfloat16"}, {"dp": 1, "tp": 2}),
    "Megatron, bfloat16, 2 ranks": Setting(2, {"backend": "megatron", "dtype": "bfloat16"}),
}


def most(gpu: int) -> int:
    """Return the most bytes of a GPU that were in use at once since `begin`."""
    return int(struct.unpack_from("q", LEDGER.read_bytes(), 8 * (64 + gpu))[0])


def begin() -> None:
    """Forget what GPUs have held. None is in use."""
    LEDGER.write_bytes(bytes(4096))


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


async def compared(engine: ProcessEngine, model: str, setting: Setting) -> tuple[int, int]:
    """Return the bytes that are told for a setting's GPU, without its context, and those that it takes."""
    keys = {"backend": "fsdp", "model": model, "mesh": "main", "micro_batch_tokens": 8192, **setting.keys}
    config, rows = rl.PolicyConfig.model_validate(keys), 64 * setting.ranks
    axes = setting.axes or {"dp": setting.ranks}
    memory = memory_of(config, Workload(axes, PROMPT, COMPLETION, rows, N, 80 << 30))
    assert memory is not None
    calls: dict[str, int] = {}
    for term in memory.terms:
        if not term.host:
            calls[term.during] = calls.get(term.during, 0) + term.nbytes
    told = calls.pop("", 0) + max(calls.values())
    begin()
    reserved = await rl.Mesh.reserve(engine, setting.ranks, rl.Resources(cpus=0, gpus=1))
    mesh = reserved.shape(**setting.axes) if setting.axes else reserved
    role = MegatronPolicy if config.backend == "megatron" else Unchecked
    policy = await mesh.spawn(role, config)
    for _ in range(2):
        await policy.update(rollouts(rows), rl.ClippedLoss())
    await policy.weights()
    await reserved.stop()
    return told, max(most(gpu) for gpu in range(setting.ranks))


async def measured() -> dict[str, tuple[int, int]]:
    """Return the bytes of each setting: told, and taken."""
    engine = ProcessEngine(["meshrl_torch.train.fsdp.roles", "meshrl_megatron.roles"])
    try:
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(SHAPE).save_pretrained(folder)
            character_tokenizer("abcdefgh>", 512).save_pretrained(folder)
            return {name: await compared(engine, folder, setting) for name, setting in SETTINGS.items()}
    finally:
        await engine.close()


def rows(found: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Of the table."""
    yield "| FSDP2 unless named, 1 rank unless named | told, MiB | ledger, MiB | apart |"
    yield "|---|---:|---:|---:|"
    for name, (told, taken) in found.items():
        yield f"| {name} | {told / MIB:.0f} | {taken / MIB:.0f} | {100 * (told / taken - 1):+.1f}% |"


if __name__ == "__main__":
    from tests.fake_gpu import ledger  # whose classes ranks can import

    sizes = asyncio.run(ledger.measured())
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps(sizes))
    else:
        table = "\n".join(rows(sizes))
        text = re.sub(
            r"(?<=<!-- ledger -->\n).*?(?=<!-- /ledger -->)", f"{table}\n", PAGE.read_text("utf-8"), flags=re.DOTALL
        )
        PAGE.write_text(text, "utf-8")
