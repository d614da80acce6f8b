"""Tiny tokenizers in the forms of real ones, with their models."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.real_rows.shapes import Shape

BOS, END, OPEN, CLOSE = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def made(scheme: str = "bytes", template: str | None = CHATML, puts: str = "$A", end: str = END) -> Any:
    """`scheme`: "bytes", or when SentencePiece puts a space before a text. `puts`: what a text is put between."""
    tokenizer = Shape("tiny", scheme, template, end, BOS, (END, OPEN, CLOSE), puts).tokenizer()
    tokenizer.pad_token = None
    return tokenizer


def save(folder: Path, tokenizer: Any, ends: list[int] | int | None = None, vocabulary: int = 0) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=ends, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
