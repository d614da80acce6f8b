"""Forced completion lengths in transformers' `generate`, for contestants that use it."""

import torch
from transformers import LogitsProcessor


class ForcedLengths(LogitsProcessor):
    """Makes row i end after exactly `lengths[i]` new tokens: EOS is impossible before, and certain then.

    Three indexed writes into the logits a decode step, some tens of microseconds of a step's milliseconds.
    """

    def __init__(self, lengths: list[int], eos: int) -> None:
        self.ends_at = {}
        for length in set(lengths):
            self.ends_at[length] = torch.tensor([row for row, each in enumerate(lengths) if each == length])
        self.eos = eos
        self.step = 0

    def __call__(self, input_ids, scores):
        """Scores of this step with EOS forbidden, except in the rows that end now, where it is alone."""
        self.step += 1
        scores[:, self.eos] = -torch.inf
        rows = self.ends_at.get(self.step)
        if rows is not None:
            scores[rows] = -torch.inf
            scores[rows, self.eos] = 0.0
        return scores
