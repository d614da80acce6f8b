"""How backends use the ranks of a mesh."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from meshrl.config import Config

Shape: TypeAlias = dict[str, Annotated[int, Field(gt=0)]]
"""Each axis of ranks and its size, the last one fastest."""


class FsdpConfig(Config):
    """How the backend `fsdp` uses its mesh: parameters are sharded over the axis `dp`, and split over `tp`."""

    replicate: int = Field(default=1, gt=0)
    """Copies of the parameters along `dp`, each sharded over `dp / replicate` ranks (HSDP)."""
    reshard_after_forward: bool = True
    """Free a block's whole parameters after its forward pass and gather them again in the backward pass (ZeRO-3)."""
    cpu_offload: bool = False
    """Keep parameters and optimizer in the host's memory; for GPUs."""
    compile: bool = False
    """Compile each block with torch.compile: slow to start, faster per step on GPUs."""


class MegatronConfig(Config):
    """How the backend `megatron` uses its mesh, beside what the mesh's axes say."""

    sequence_parallel: bool = True
    """Split activations along the axis `tp` between its matrices too."""
    virtual_stages: int = Field(default=1, gt=0)
    """Stages of the pipeline that each rank along `pp` holds."""
    experts: int = Field(default=1, gt=0)
    """Neighbours along `dp` that divide the experts of a mixture among them, each with its ranks along `tp`."""


class VllmConfig(Config):
    """How the backend `vllm` runs its engines: one for each place along `dp`, over the ranks along `tp`."""

    python: str | None = None
    """The interpreter of an environment that has vLLM, whose pins need not be those of this one; nothing means this."""
    kv_cache_mib: int | None = Field(default=None, gt=0)
    """Memory for keys and values; nothing means what `memory_share` leaves, and on a CPU 512."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Of a GPU's memory, how much the engine may take."""
    eager: bool = False
    """No CUDA graphs: quicker to start, slower to decode."""
    sleep: bool = False
    """Give the GPU's memory back while no row is decoded: for a sampler on the mesh of what trains, and `ahead` = 0."""
    after_load: Literal["recompute", "keep"] = "recompute"
    """What running rows have of tokens before new weights: read again with these, or kept as the old ones left it."""
