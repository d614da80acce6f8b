"""The models whose images vLLM reads as transformers does."""

from typing import Final

from meshrl.errors import ModelError
from meshrl.roles import SamplerConfig
from meshrl_torch.model.loading import config_of

PROVEN: Final = ("internvl", "llava", "qwen2_5_vl", "qwen3_vl")
"""Types of models whose log-probs are compared with transformers' in tests."""


def check_images(config: SamplerConfig) -> None:
    """Raise ModelError if a table's sampler takes no images: its model is of another type, or adapters come alone."""
    kind = config_of(config).model_type
    if kind not in PROVEN:
        raise ModelError(
            f"the backend 'vllm' takes images for models of the types {', '.join(PROVEN)}, and this one's is {kind}: "
            'set sampler.backend = "torch"'
        )
    if config.lora is not None or config.adapters is not None:
        raise ModelError(
            "the backend 'vllm' takes no images while it loads adapters alone: set sync = \"merged\" for the policy's "
            'adapters, or sampler.backend = "torch"'
        )
