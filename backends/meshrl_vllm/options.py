"""The table `[sampler.vllm]`. `meshrl serve` uses its environment and memory."""

from typing import Literal

from pydantic import Field

from meshrl_inference.options import EngineOptions


class VllmConfig(EngineOptions):
    """How the backend `vllm` runs its engines."""

    quantization: Literal["fp8"] | None = None
    """`fp8`: round the matrices of linear layers, without the head, to FP8 with a scale for each row, and what they are
    multiplied with to FP8 with a scale for each token. Takes half the memory of bfloat16, and is less exact."""

    max_adapters: int = Field(default=8, gt=0)
    """Most adapters whose rows are decoded in one step, if the sampler has any. Others wait, or are read again."""
    max_rank: int | None = Field(default=None, gt=0)
    """Highest rank of an adapter. Default: the highest that is declared, or 32."""

    @property
    def room(self) -> tuple[int, int | None]:
        """Most adapters, and the highest rank."""
        return self.max_adapters, self.max_rank

    @property
    def own(self) -> dict[str, bool | str | None]:
        """The options that only this engine has."""
        return {"quantization": self.quantization}

    @property
    def quantized(self) -> str:
        """The format of the matrices."""
        return self.quantization or ""
