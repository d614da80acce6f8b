"""Adapters on CPUs, where vLLM gives rows without one the last adapter that there is."""

# vLLM may be in another environment than this one.
# pyright: reportMissingImports=false

from torch import Tensor


def leave_rows_without() -> None:
    """Let rows without an adapter be as the model makes them.

    Their index is -1. vLLM's kernels for GPUs skip it. Its operations in torch take it as an index, and so the last
    adapter in memory, as soon as another row of the step has one.
    """
    from vllm.lora.ops.torch_ops import lora_ops  # noqa: PLC0415 -- in an environment that is set
    from vllm.lora.punica_wrapper import punica_cpu  # noqa: PLC0415 -- as above

    shrink = lora_ops.bgmv_shrink

    def shrunk(inputs: Tensor, weights: Tensor, output: Tensor, adapters: Tensor, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, adapters, scaling)
        output[adapters < 0] = 0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrunk
