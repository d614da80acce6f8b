"""Encode a batch's texts as the token columns for training."""

import numpy as np

from meshrl.data import Batch, Ragged
from meshrl_hf.dialogues import encode_messages
from meshrl_hf.model import LanguageModel
from meshrl_hf.text import encode_completions, encode_prompts, texts_of


def encoded(model: LanguageModel, batch: Batch) -> Batch:
    """Add `tokens` and `loss_mask`, from `messages` or else from `prompt` and `completion`.

    DataError for a row that is too long, and for invalid dialogues as in `encode_messages`.
    """
    if "messages" in batch:
        return encode_messages(model, batch)
    prompts = encode_prompts(model.tokenizer, texts_of(batch, "prompt"), model.chat)
    completions = encode_completions(model.tokenizer, texts_of(batch, "completion"))
    pairs = list(zip(prompts, completions, strict=True))
    for row, (prompt, completion) in enumerate(pairs):
        model.check_lengths(len(prompt) + len(completion), f"row {row}")
    masks = [[False] * len(prompt) + [True] * len(completion) for prompt, completion in pairs]
    return batch.assign(
        tokens=Ragged.of([prompt + completion for prompt, completion in pairs], np.int32),
        loss_mask=Ragged.of(masks, np.bool_),
    )
