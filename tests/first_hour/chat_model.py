"""A tiny model that chats, and its tokenizer, as they lie in a folder that was downloaded."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


def save_tokenizer(folder: Path) -> int:
    """Write a tokenizer of a token a byte, with a chat template; how many tokens it has."""
    tokens = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(tokens)


def save_model(folder: Path, longest: int = 2048) -> Path:
    folder.mkdir(parents=True)
    shape = LlamaConfig(
        vocab_size=save_tokenizer(folder), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=longest, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(shape).bfloat16().save_pretrained(folder)
    return folder
