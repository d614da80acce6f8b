"""The table `[ROLE.fsdp]`."""

from typing import Annotated, Literal

from pydantic import Field

from meshrl.roles import BackendOptions
from meshrl_hf.options import Attention


class FsdpConfig(BackendOptions):
    """How the backend `fsdp` uses its mesh: parameters are sharded over the axis `dp`, and split over `tp`."""

    replicate: int = Field(default=1, gt=0)
    """Copies of the parameters along `dp`, each sharded over `dp / replicate` ranks (HSDP)."""
    reshard_after_forward: bool | Annotated[int, Field(gt=1)] = True
    """Free a block's whole parameters after its forward pass and gather them again in the backward pass (ZeRO-3).

    A number: keep them, until then, sharded over that many neighbours, such as the ranks of a machine.
    """
    prefetch: int = Field(default=0, ge=0)
    """Blocks whose parameters are asked for before a block is computed, beside those that FSDP2 asks for by itself."""
    gradient_sync: Literal["each", "last"] = "each"
    """Sum gradients over the ranks after each pass, or after a step's last: until then each rank keeps whole ones."""
    cpu_offload: bool = False
    """Keep parameters and optimizer in the host's memory; for GPUs."""
    offload_moments: bool = False
    """Keep the optimizer's moments in the host's memory but for its step: for GPUs that a sampler shares."""
    compile: bool = False
    """Compile each block with torch.compile: slow to start, faster per step on GPUs."""
    attention: Attention = "auto"
    """The kernel for packed sequences on GPUs."""
