"""The class of transformers for a model that generates. Both ends name its tensors by it."""

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


def generator_of(shape: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Return the class by which transformers reads and makes a model that generates: of text, or of images and text."""
    sees = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(shape.model_type)
    named = (getattr(shape, "architectures", None) or [None])[0]
    is_text = shape.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (named is None or named != sees)
    return AutoModelForCausalLM if sees is None or is_text else AutoModelForImageTextToText
