"""Options that several backends share."""

from typing import Literal, TypeAlias

Attention: TypeAlias = Literal["auto", "flash-attn-4", "flash-attn", "varlen", "sdpa"]
"""The attention kernel for packed sequences: flash-attn 4, flash-attn, torch's varlen, torch's SDPA for single
sequences, or (`auto`) the first of these that is installed. The first three fall back to SDPA in float32, and for head
sizes that they do not support."""
