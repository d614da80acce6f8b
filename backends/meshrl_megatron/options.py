"""The table `[ROLE.megatron]`."""

from pydantic import Field

from meshrl.roles import BackendOptions
from meshrl_hf.options import Attention


class MegatronConfig(BackendOptions):
    """How the backend `megatron` uses its mesh, in addition to the mesh's axes."""

    sequence_parallel: bool = True
    """Split the activations between the matrices along the axis `tp` too."""
    virtual_stages: int = Field(default=1, gt=0)
    """Pipeline stages that each rank along `pp` holds."""
    experts: int = Field(default=1, gt=0)
    """Number of neighbours along `dp` that share the experts of a mixture, each with its ranks along `tp`."""
    attention: Attention = "auto"
    """The kernel for packed sequences on GPUs."""
