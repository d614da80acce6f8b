"""Append an environment's observation to a row."""

import numpy as np
from numpy.typing import NDArray

from meshrl.data import Batch, Ragged
from meshrl_hf.text import Words, encode_texts


def observed(words: Words, rows: Batch) -> tuple[Batch, NDArray[np.bool_]]:
    """Append the tokens of `observation` to rows. Also returns the rows without room, bool[rows].

    The new tokens are not learned, their log-probs are 0 and their versions -1. A row has no room if the model could
    not read it and one more token, and is returned unchanged. DataError for a text that the tokenizer cannot encode.
    """
    texts = [str(text) if text else "" for text in rows.objects("observation")]
    encoded = encode_texts(words.tokenizer, texts)
    lengths, added = rows.tokens.lengths, np.array([len(ids) for ids in encoded], np.int64)
    full = (added > 0) & (lengths + added + 1 > words.max_tokens)
    ids = [[] if no_room else row for row, no_room in zip(encoded, full.tolist(), strict=True)]

    def after(column: Ragged, new: list[list[int]], dtype: type[np.generic]) -> Ragged:
        parts = [np.concatenate([had, np.array(add, dtype)]) for had, add in zip(column, new, strict=True)]
        return Ragged.of(parts, dtype)

    nothing = [[0] * len(row) for row in ids]
    whole = rows.assign(
        tokens=after(rows.tokens, ids, np.int32),
        loss_mask=after(rows.loss_mask, nothing, np.bool_),
        sampler_logprobs=after(rows.sampler_logprobs, nothing, np.float32),
        versions=after(rows.versions, [[-1] * len(row) for row in ids], np.int32),
    )
    return whole.drop("observation"), full
