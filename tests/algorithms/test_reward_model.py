"""GRPO with a judge in place of a function: the policy learns what the judge likes."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from meshrl import Run, RunConfig
from meshrl.config import validate
from meshrl.user_code import import_file
from meshrl_hf.text import character_tokenizer

CHARACTERS = "abcd>"
MODEL = {"characters": CHARACTERS, "hidden_size": 16, "ffn_size": 32, "layers": 1, "heads": 2, "max_tokens": 16}
SHAPE: dict[str, Any] = {
    "vocab_size": 7,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "num_labels": 1,
}


def save_judge(folder: Path) -> str:
    """A judge that gives more, the more of the last characters are b: its one layer takes their mean."""
    network = LlamaForSequenceClassification(LlamaConfig(**SHAPE))
    weights = network.state_dict()
    with torch.no_grad():
        for name, weight in weights.items():
            if "norm" not in name:
                weight.zero_()
        weights["model.embed_tokens.weight"][:, 0] = 1.0
        weights["model.embed_tokens.weight"][3, 1] = 4.0  # b
        for name in ("v_proj", "o_proj"):
            weights[f"model.layers.0.self_attn.{name}.weight"].copy_(torch.eye(16))
        weights["score.weight"][0, 1] = 1.0
    network.save_pretrained(folder)
    character_tokenizer(CHARACTERS, 16).save_pretrained(folder)
    return str(folder)


async def test_grpo_learns_what_a_judge_likes(tmp_path: Path) -> None:
    judge = save_judge(tmp_path / "judge")
    rows = [{"question": f"{one}{other}>", "answer": "b"} for one in "acd" for other in "acd"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    module = import_file(Path(__file__).parents[2] / "algorithms" / "grpo.py")
    table = {
        "task": {"source": str(tmp_path / "rows.jsonl"), "held_out": 0},
        "policy": {"model": MODEL, "optimizer": {"lr": 0.02}},
        "reward": {"model": judge},
        "sampling": {"n": 8, "max_tokens": 4},
        "prompts": 8,
        "steps": 6,
    }
    config = validate(vars(module)["GrpoConfig"], table, "test")
    async with Run(RunConfig(folder=str(tmp_path), name="run")) as run:
        await vars(module)["grpo"](run, config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward_errors"] for line in lines] == [0] * 6
    assert lines[-1]["reward"] > lines[0]["reward"] + 0.1
