"""The table `[ROLE.megatron]`."""

from pydantic import Field

from meshrl.roles import BackendOptions
from meshrl_hf.options import Attention


class MegatronConfig(BackendOptions):
    """How the backend `megatron` uses its mesh, beside what the mesh's axes say."""

    sequence_parallel: bool = True
    """Split activations along the axis `tp` between its matrices too."""
    virtual_stages: int = Field(default=1, gt=0)
    """Stages of the pipeline that each rank along `pp` holds."""
    experts: int = Field(default=1, gt=0)
    """Neighbours along `dp` that divide the experts of a mixture among them, each with its ranks along `tp`."""
    attention: Attention = "auto"
    """The kernel for packed sequences on GPUs."""
