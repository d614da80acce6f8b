"""Do a small Qwen3.5 and a small gpt-oss learn? GRPO's quickstart with each, and its losses by FSDP2 on two ranks.

    python bench/families.py --json F [--models qwen3_5_text,gpt_oss] [--steps N] [--folder F]

The models have the quickstart's size and random weights: gated delta nets and attention in turn, and a mixture of
experts with sinks and windows. Each runs `sft/quickstart` until about half of its greedy answers are right, and then
`grpo/quickstart`. The greedy exact match on held-out words has to rise by .25. Then five steps from the same warm-up on
one rank and, with the backend `fsdp`, on two have to have the same losses. One core each. About 10 minutes.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bench.harness import Figure, alone, arguments, at_least, at_most, report
from meshrl.run import find_config, load_job
from meshrl_torch.model.text import END, PAD, character_tokenizer

RISE: Final = 0.25
CLOSE: Final = 1e-5
"""Allowed difference of losses, in nats."""
COMMON: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3_5_text": {
        "intermediate_size": 192,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "gpt_oss": {
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
WARM_UP: Final = {"qwen3_5_text": 100, "gpt_oss": 150}
"""Supervised steps. After 200, as in the quickstart, Qwen3.5 has little left to learn."""


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--models", default=",".join(OWN), help="which (default: both)")
    parser.add_argument("--steps", type=int, default=150, help="steps of GRPO (default: 150)")
    parser.add_argument("--folder", type=Path, help="keep the runs there")
    options = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        for name in options.models.split(","):
            write_model(name, folder / name)
            figures += learned(name, folder, options.steps)
    report("families", figures, options.json)


def write_model(name: str, folder: Path) -> None:
    """Write a model with random weights, which knows the quickstart's characters."""
    sft: Any = load_job(find_config("sft/quickstart"), ()).config
    tokenizer = character_tokenizer(sft.policy.model.characters, sft.policy.model.max_tokens)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": sft.policy.model.max_tokens}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**COMMON, **sizes, **OWN[name]), dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def learned(name: str, folder: Path, steps: int) -> list[Figure]:
    """Train a model, and compare what it answers before and after, and its losses on one rank and on two."""
    run(folder, f"{name}-warm", "sft/quickstart", f"policy.model={folder / name}", f"steps={WARM_UP[name]}")
    model = f"policy.model={folder / f'{name}-warm' / 'model'}"
    run(folder, f"{name}-grpo", "grpo/quickstart", model, f"steps={steps}")
    greedy = [line["eval/greedy"] for line in lines(folder / f"{name}-grpo/evaluations.jsonl")]
    two = ("policy.backend=fsdp", "run.engine=processes", "policy.mesh=train", "run.meshes.train.ranks=2")
    losses: list[list[float]] = []
    for side, settings in {"one": (), "two": two}.items():
        run(folder, f"{name}-{side}", "grpo/quickstart", model, "steps=5", *settings)
        losses.append([line["loss"] for line in lines(folder / f"{name}-{side}/metrics.jsonl")])
    apart = max(abs(one - other) for one, other in zip(*losses, strict=True))
    return [
        at_least(
            f"{name}, greedy exact match, rise from {greedy[0]:.3f} to {greedy[-1]:.3f}",
            greedy[-1] - greedy[0],
            "of 1",
            RISE,
            1,
        ),
        at_most(f"{name}, largest difference of losses, fsdp on 2 ranks", apart, "nats", CLOSE),
    ]


def run(folder: Path, name: str, config: str, *settings: str) -> None:
    """Run a configuration on one core."""
    meshrl = Path(sys.executable).parent / "meshrl"
    alone([meshrl, "run", config, f"run.folder={folder}", f"run.name={name}", *settings], threads=1)


def lines(file: Path) -> list[dict[str, float]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    main()
