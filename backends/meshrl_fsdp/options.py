"""The table `[ROLE.fsdp]`."""

from pydantic import Field

from meshrl.roles import BackendOptions
from meshrl_hf.options import Attention


class FsdpConfig(BackendOptions):
    """How the backend `fsdp` uses its mesh: parameters are sharded over the axis `dp`, and split over `tp`."""

    replicate: int = Field(default=1, gt=0)
    """Copies of the parameters along `dp`, each sharded over `dp / replicate` ranks (HSDP)."""
    reshard_after_forward: bool = True
    """Free a block's whole parameters after its forward pass and gather them again in the backward pass (ZeRO-3)."""
    cpu_offload: bool = False
    """Keep parameters and optimizer in the host's memory; for GPUs."""
    compile: bool = False
    """Compile each block with torch.compile: slow to start, faster per step on GPUs."""
    attention: Attention = "auto"
    """The kernel for packed sequences on GPUs."""
