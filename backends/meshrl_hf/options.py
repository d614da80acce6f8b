"""What tables of several backends' own options have in common."""

from typing import Literal, TypeAlias

Attention: TypeAlias = Literal["auto", "flash-attn-4", "flash-attn", "varlen", "sdpa"]
"""The kernel for packed sequences: flash-attn 4's, flash-attn's, torch's own, torch's for one sequence, or the first of
these that is there. In float32, and for heads that they do not take, the first three are SDPA."""
