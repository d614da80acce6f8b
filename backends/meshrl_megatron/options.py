"""The table `[ROLE.megatron]`."""

from typing import Literal, TypeAlias

from pydantic import Field

from meshrl.roles import BackendOptions
from meshrl_torch.options import Attention

TransformerImpl: TypeAlias = Literal["local", "transformer_engine"]
"""Whose modules the decoder layers have, by Megatron-Core's names."""


class MegatronConfig(BackendOptions):
    """How the backend `megatron` uses its mesh, in addition to the mesh's axes."""

    sequence_parallel: bool = True
    """Split the activations between the matrices along the axis `tp` too."""
    virtual_stages: int = Field(default=1, gt=0)
    """Pipeline stages that each rank along `pp` holds."""
    experts: int = Field(default=1, gt=0)
    """Number of neighbours along `dp` that share the experts of a mixture, each with its ranks along `tp`."""
    transformer_impl: TransformerImpl = "local"
    """The modules of decoder layers. `local`: meshrl's norms and Megatron-Core's linear layers, with the bits of
    transformers on one rank. `transformer_engine`: those of Transformer Engine, which must be installed; for GPUs."""
    attention: Attention = "auto"
    """The kernel for packed sequences on GPUs."""
