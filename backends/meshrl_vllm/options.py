"""The table `[sampler.vllm]`. `meshrl serve` uses its environment and memory."""

from typing import Literal

from meshrl_inference.options import EngineOptions


class VllmConfig(EngineOptions):
    """How the backend `vllm` runs its engines."""

    quantization: Literal["fp8"] | None = None
    """`fp8`: round the matrices of linear layers, without the head, to FP8 with a scale for each row, and what they are
    multiplied with to FP8 with a scale for each token. Takes half the memory of bfloat16, and is less exact."""

    @property
    def quantized(self) -> str:
        """The format of the matrices."""
        return self.quantization or ""
