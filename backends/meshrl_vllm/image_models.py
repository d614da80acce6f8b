"""The models whose images vLLM reads as transformers does."""

from typing import Final

from meshrl.errors import ModelError
from meshrl.roles import SamplerConfig
from meshrl_torch.model.loading import config_of

PROVEN: Final = ("internvl", "llava", "qwen2_5_vl", "qwen3_vl")
"""Types of models whose log-probs tests compare with a policy's."""
_TOWERS: Final = {"llava": "clip_vision_model"}
"""The tower that was compared, of types that have others too."""


def check_images(config: SamplerConfig) -> None:
    """Raise ModelError if a table's sampler takes no images: its model is of another type, or adapters come alone."""
    shape = config_of(config)
    kind, tower = shape.model_type, getattr(getattr(shape, "vision_config", None), "model_type", "")
    if kind not in PROVEN:
        raise ModelError(
            f"the backend 'vllm' takes images for models of the types {', '.join(PROVEN)}, and this one's is {kind}: "
            'set sampler.backend = "torch"'
        )
    if tower != _TOWERS.get(kind, tower):
        raise ModelError(
            f"the backend 'vllm' takes images for a {kind} with the tower {_TOWERS[kind]}, and this one's is {tower}: "
            'set sampler.backend = "torch"'
        )
    if config.lora is not None or config.adapters is not None:
        raise ModelError(
            "the backend 'vllm' takes no images while it loads adapters alone: set sync = \"merged\" for the policy's "
            'adapters, or sampler.backend = "torch"'
        )
