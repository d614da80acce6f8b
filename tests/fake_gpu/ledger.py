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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import meshrl as rl
from meshrl.roles import Workload, memory_of
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
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "float32": {},
    "bfloat16": NARROW,
    "bfloat16, recomputed": RECOMPUTED,
    "bfloat16, adapters": {**NARROW, "lora": {"rank": 16}},
    "bfloat16, `fsdp.cpu_offload`": {**NARROW, "fsdp": {"cpu_offload": True}},
    "bfloat16, recomputed, `fsdp.offload_moments`": {**RECOMPUTED, "fsdp": {"offload_moments": True}},
}


def rollouts() -> rl.Batch:
    """Make rows of the longest prompt and completion."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 1000, (ROWS // N, PROMPT))
    pairs = [np.concatenate([prompts[row // N], rng.integers(2, 1000, COMPLETION)]) for row in range(ROWS)]
    tokens = rl.Ragged.of(pairs, np.int32)
    return rl.Batch.of(
        tokens=tokens,
        loss_mask=rl.Ragged(np.tile(np.arange(PROMPT + COMPLETION) >= PROMPT, ROWS), tokens.offsets),
        sampler_logprobs=rl.Ragged(np.full(len(tokens.values), -2.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=ROWS).astype(np.float32),
    )


def told(config: rl.PolicyConfig) -> int:
    """Return the bytes that a policy is told to take of a GPU, without CUDA's context."""
    memory = memory_of(config, Workload({"dp": 1}, PROMPT, COMPLETION, ROWS, N, 80 << 30))
    assert memory is not None
    calls: dict[str, int] = {}
    for term in memory.terms:
        if not term.host:
            calls[term.during] = calls.get(term.during, 0) + term.nbytes
    return calls.pop("", 0) + max(calls.values())


async def taken(config: rl.PolicyConfig) -> int:
    """Return the most bytes of the GPU that were in use at once, in two updates and while weights are published."""
    gc.collect()  # the policy before
    torch.cuda.empty_cache()
    ledger = bytearray(LEDGER.read_bytes())
    ledger[MOST : MOST + 8] = ledger[:8]
    LEDGER.write_bytes(ledger)
    with patch("meshrl_torch.train.fsdp.loading.check_packing"):  # which reads numbers
        policy = FsdpPolicy(config)
    for _ in range(2):
        await policy.update(rollouts(), rl.ClippedLoss())
    await policy.weights()
    return int(struct.unpack_from("q", LEDGER.read_bytes(), MOST)[0])


def measured() -> dict[str, tuple[int, int]]:
    """Return the bytes of each setting: told, and taken."""
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(SHAPE).save_pretrained(folder)
        character_tokenizer("abcdefgh>", 512).save_pretrained(folder)
        own = {"backend": "fsdp", "model": folder, "micro_batch_tokens": 8192}
        configs = {name: rl.PolicyConfig.model_validate({**own, **keys}) for name, keys in SETTINGS.items()}
        sums = {name: told(config) for name, config in configs.items()}  # before there is a process group
        if not LEDGER.exists():
            LEDGER.write_bytes(bytes(4096))
        (left,) = struct.unpack_from("q", LEDGER.read_bytes())  # by processes that were killed
        return {name: (sums[name], asyncio.run(taken(config)) - left) for name, config in configs.items()}


def rows(found: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Of the table."""
    yield "| FSDP2 | told, MiB | ledger, MiB | apart |"
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
