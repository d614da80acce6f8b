"""Tiny tokenizers in the forms of real ones, with their models."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CORPUS = ["the user asks what is 1 + 2", "yes no", "def f(x):\n    return x", "assistant\n", "hello world 3 4"]
BOS, END, OPEN, CLOSE = SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def made(scheme: str = "bytes", template: str | None = CHATML, puts: str = "$A", end: str = END) -> Any:
    """`scheme`: "bytes", or when SentencePiece puts a space before a text. `puts`: what a text is put between."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    alphabet = sorted({*"".join(CORPUS), "▁", "<", ">", "|", ".", "/"})
    if scheme == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=list(SPECIAL), show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=puts, special_tokens=[(name, tokenizer.token_to_id(name)) for name in SPECIAL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=end, chat_template=template,
        additional_special_tokens=[OPEN, CLOSE], clean_up_tokenization_spaces=False,
    )  # fmt: skip


def save(folder: Path, tokenizer: Any, ends: list[int] | int | None = None, vocabulary: int = 0) -> str:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary or len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=ends, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
