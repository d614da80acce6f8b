"""Model FLOPs utilisation of `update` on one GPU: the model's FLOPs per second, divided by the GPU's peak.

    python bench/utilisation.py --json F [--rounds N]

The backend fsdp on one rank, in bfloat16 with float32 weights and moments and activation checkpointing. The models have
random weights in the shapes below, and train on 16 packed rows of 512 to 8,192 tokens. FLOPs are 6 per weight and
token, and those of causal attention, without recomputation (Chowdhery et al. 2022, arXiv:2204.02311, B). Models that do
not fit are left out, and GPUs whose peak the table lacks. Without a GPU there are no figures.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from typing import Final

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from bench.harness import Figure, arguments, figure, median, report
from meshrl import Batch, ClippedLoss, NewModel, PolicyConfig, Ragged, Run, RunConfig
from meshrl.engines.local import RankLoop
from meshrl.roles import ModelConfig, OptimizerConfig, Policy
from meshrl_torch.model.loading import load

PEAKS: Final = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16 FLOPs per second as the vendor states. The first name that is part of the device's counts."""
SHAPES: Final[dict[str, PretrainedConfig]] = {
    "Qwen2.5-0.5B": Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Llama-3.2-1B": LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "Qwen2.5-3B": Qwen2Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=11_008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}
LONGEST: Final = 8192


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--worker", choices=SHAPES, help="be this model")
    options = parser.parse_args()
    if options.worker:
        with asyncio.Runner(loop_factory=RankLoop) as runner:
            print(json.dumps(runner.run(measure(SHAPES[options.worker], options.rounds))))
        return
    report("utilisation", compare(options.rounds), options.json)


def compare(rounds: int) -> list[Figure]:
    """Measure every model that fits, each in a separate process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((peak for name, peak in PEAKS.items() if name in device), 0.0)
    figures: list[Figure] = []
    for name, config in SHAPES.items() if peak else ():
        weights = sum(weights_of(config))
        if 18 * weights + 8 * 2**30 > torch.cuda.mem_get_info()[0]:  # weights, gradients and moments, plus activations
            continue
        command = [sys.executable, __file__, "--worker", name, "--rounds", str(rounds)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        answer: dict[str, float] = json.loads(output.splitlines()[-1])
        figures.append(figure(f"{name}, {weights / 1e9:.2f}B, tokens", answer["tokens"] / answer["wall"], "tokens/s"))
        figures.append(figure(f"{name}, on {device}", answer["flops"] / answer["wall"] / 1e12, "TFLOP/s", peak / 1e12))
    return figures


def weights_of(config: PretrainedConfig) -> tuple[int, int, int]:
    """Number of weights of the layers, of the head, and of embeddings that are not the head."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    head = network.get_output_embeddings().weight.numel()
    every = sum(parameter.numel() for parameter in network.parameters())
    embeddings = 0 if config.tie_word_embeddings else network.get_input_embeddings().weight.numel()
    return every - head - embeddings, head, embeddings


def make_rows(vocabulary: int) -> Batch:
    """Rows whose tokens are all learned except the first."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(512), np.log(LONGEST), 16)).round().astype(int)
    offsets = np.append(0, np.cumsum(lengths))
    count = int(offsets[-1])
    place = np.arange(count) - np.repeat(offsets[:-1], lengths)
    return Batch.of(
        tokens=Ragged(rng.integers(0, vocabulary, count, dtype=np.int32), offsets),
        loss_mask=Ragged(place > 0, offsets),
        sampler_logprobs=Ragged(np.full(count, -np.log(vocabulary), np.float32), offsets),
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
    )


def flops_of(config: PretrainedConfig, batch: Batch) -> float:
    """FLOPs of one step."""
    layers, head, _ = weights_of(config)
    inputs = batch.lengths.astype(float) - 1  # no position reads a row's last token
    dims = config.num_hidden_layers * config.hidden_size
    return float(6 * (layers + head) * inputs.sum() + 6 * dims * (inputs**2).sum())


async def measure(config: PretrainedConfig, rounds: int) -> dict[str, float]:
    """Train a model of random weights. Returns seconds per step, its tokens, and its FLOPs."""
    batch = make_rows(config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        config.eos_token_id, config.max_position_embeddings = 1, LONGEST
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        load(ModelConfig(model=NewModel(characters="abc", max_tokens=8))).tokenizer.save_pretrained(folder)
        async with Run(RunConfig(folder=folder, name="run")) as run:
            optimizer = OptimizerConfig(lr=1e-6)
            policy = await run.spawn(
                Policy,
                PolicyConfig(
                    backend="fsdp", model=folder, dtype="bfloat16", optimizer=optimizer, activation_checkpointing=True
                ),
            )
            walls: list[float] = []
            for _ in range(rounds + 2):
                began = time.perf_counter()
                await policy.update(batch, ClippedLoss())
                walls.append(time.perf_counter() - began)
    return {"wall": median(walls[2:]), "tokens": float(batch.lengths.sum()), "flops": flops_of(config, batch)}


if __name__ == "__main__":
    main()
