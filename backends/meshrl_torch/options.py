"""The table `[ROLE.fsdp]`, and an option that backends share. No torch is loaded here."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from meshrl.roles import BackendOptions

Attention: TypeAlias = Literal["auto", "flash-attn-4", "flash-attn", "varlen", "sdpa"]
"""The attention kernel for packed sequences: flash-attn 4, flash-attn, torch's varlen, torch's SDPA for single
sequences, or (`auto`) the first of these that is installed. The first three fall back to SDPA in float32, and for head
sizes that they do not support."""


class FsdpConfig(BackendOptions):
    """How the backend `fsdp` uses its mesh. Parameters are sharded over the axis `dp`, and split over `tp`."""

    replicate: int = Field(default=1, gt=0)
    """Copies of the parameters along `dp`. Each is sharded over `dp / replicate` ranks (HSDP)."""
    reshard_after_forward: bool | Annotated[int, Field(gt=1)] = True
    """Free a block's whole parameters after its forward pass, and gather them again in the backward pass (ZeRO-3).

    A number keeps them sharded over that many neighbours until then, such as the ranks of a machine.
    """
    prefetch: int = Field(default=0, ge=0)
    """Blocks whose parameters are gathered in advance, in addition to those that FSDP2 prefetches by itself."""
    gradient_sync: Literal["each", "last"] = "each"
    """Sum gradients over the ranks after each pass, or only after a step's last pass. With `last`, each rank keeps
    whole gradients until then."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in the host's memory. For GPUs."""
    offload_moments: bool = False
    """Keep the optimizer's moments in the host's memory except during its step. For GPUs that a sampler shares."""
    compile: bool = False
    """Compile each block with torch.compile. Slow to start, and faster steps on GPUs."""
    attention: Attention = "auto"
    """The kernel for packed sequences on GPUs."""
