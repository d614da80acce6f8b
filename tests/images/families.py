"""Tiny vision-language models with random weights, one of each family, in folders like those of the hub."""

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    Gemma3ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    LlavaImageProcessorPil,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyz ?\n"
LIMIT: Final = 256
"""The longest row, in tokens."""
_TEXT: Final[Mapping[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LIMIT, "eos_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
_SEES: Final[Mapping[str, Any]] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
_ROPE: Final = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN: Final[Mapping[str, Any]] = {
    "depth": 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": 16,
    "intermediate_size": 24, "out_hidden_size": 32,
}  # fmt: skip
_VIDEOS: Final = {
    "qwen2_5_vl": "Qwen2VLVideoProcessor", "qwen3_vl": "Qwen3VLVideoProcessor", "internvl": "InternVLVideoProcessor",
}  # fmt: skip
_NAMED: Final = {"image_token": "<image>"}
_PADS: Final = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_AROUND: Final = {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}


def tokenizer(names: Mapping[str, str], marks: str, opening: str = "") -> PreTrainedTokenizerFast:
    """Make a tokenizer of characters with special tokens. `marks`: what a template puts for an image."""
    special = [*names.values()]
    vocabulary = {token: at for at, token in enumerate(("<pad>", "<end>", "<user>", "<says>", *special, *CHARACTERS))}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    own.decoder = decoders.Fuse()
    part = "{% if part['type'] == 'image' %}" + marks + "{% else %}{{ part['text'] }}{% endif %}"
    template = (
        opening + "{% for message in messages %}{{ '<user>' if message['role'] == 'user' else '<says>' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}" + part + "{% endfor %}{% endif %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<says>{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<says>"],
        extra_special_tokens=dict(names),
        model_max_length=LIMIT,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _shape(kind: str, words: PreTrainedTokenizerFast, vision: Mapping[str, Any], **own: Any) -> PretrainedConfig:
    text = {**_TEXT, "vocab_size": len(words), **own.pop("text", {})}
    made: Any = CONFIG_MAPPING[kind]
    return cast(
        "PretrainedConfig", made(text_config=text, vision_config=dict(vision), tie_word_embeddings=False, **own)
    )


def _qwen(kind: str, **vision: Any) -> Any:
    names = _PADS | _AROUND
    words = tokenizer(names, "<|vision_start|><|image_pad|><|vision_end|>")
    image, video, start, end = map(words.convert_tokens_to_ids, names.values())
    ids = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end}
    text = {"rope_parameters": {**_ROPE, **({"mrope_interleaved": True} if kind == "qwen3_vl" else {})}}
    shape = _shape(kind, words, {**_QWEN, **vision}, text=text, **ids)
    own = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    name = "Qwen2_5_VLProcessor" if kind == "qwen2_5_vl" else "Qwen3VLProcessor"
    return shape, words, own, {"processor_class": name}


def _qwen3() -> Any:
    return _qwen("qwen3_vl", num_position_embeddings=64, deepstack_visual_indexes=[0])


def _smolvlm() -> Any:
    names = {"fake_image_token": "<fake_token_around_image>", **_NAMED, "global_image_token": "<global-img>",
             "end_of_utterance_token": "<end_of_utterance>", "video_token": "<video>"}  # fmt: skip
    cells = {f"cell{row}{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)}
    words = tokenizer({**names, **cells}, "<image>")
    vision = {**_SEES, "image_size": 16, "patch_size": 4}
    image = words.convert_tokens_to_ids("<image>")
    text = {"model_type": "llama"}
    shape = _shape("smolvlm", words, vision, text=text, image_token_id=image, scale_factor=2, pad_token_id=0)
    own = SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    return shape, words, own, {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}


def _gemma3() -> Any:
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    words = tokenizer(names, "<start_of_image>")
    vision = {**_SEES, "image_size": 16, "patch_size": 4}
    ids = dict(
        zip(
            ("boi_token_index", "eoi_token_index", "image_token_id"),
            map(words.convert_tokens_to_ids, names.values()),
            strict=True,
        )
    )
    text = {"sliding_window": 8, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
    shape = _shape("gemma3", words, vision, text=text, mm_tokens_per_image=4, **ids)
    own = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return shape, words, own, {"processor_class": "Gemma3Processor", "image_seq_length": 4}


def _llava() -> Any:
    words = tokenizer(_NAMED, "<image>")
    vision = {**_SEES, "image_size": 16, "patch_size": 4, "model_type": "clip_vision_model", "projection_dim": 16}
    image = words.convert_tokens_to_ids("<image>")
    ways = {"vision_feature_select_strategy": "default", "vision_feature_layer": -1}
    shape = _shape("llava", words, vision, text={"model_type": "llama"}, image_token_index=image, **ways)
    own = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    more = {"patch_size": 4, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    return shape, words, own, {"processor_class": "LlavaProcessor", **more}


def _internvl() -> Any:
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
             "video_token": "<video>"}  # fmt: skip
    words = tokenizer(names, "<IMG_CONTEXT>")
    vision = {**_SEES, "image_size": [16, 16], "patch_size": [4, 4]}
    image = words.convert_tokens_to_ids("<IMG_CONTEXT>")
    text = {"model_type": "qwen2"}
    shape = _shape("internvl", words, vision, text=text, image_token_id=image, image_seq_length=4)
    own = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4)
    return shape, words, own, {"processor_class": "InternVLProcessor", "image_seq_length": 4}


FAMILIES: Final[Mapping[str, Callable[[], Any]]] = {
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl", window_size=16, fullatt_block_indexes=[0]),
    "qwen3_vl": _qwen3,
    "smolvlm": _smolvlm,
    "gemma3": _gemma3,
    "llava": _llava,
    "internvl": _internvl,
}


def _widen(shape: Any, folder: Path) -> None:
    """Give the text model heads of 32 dims, and the folder what reads videos."""
    for name, size in (("hidden_size", 64), ("num_attention_heads", 2), ("num_key_value_heads", 1), ("head_dim", 32)):
        setattr(shape.text_config, name, size)
    if "mrope_section" in shape.text_config.rope_parameters:
        shape.text_config.rope_parameters["mrope_section"] = [4, 6, 6]
        shape.vision_config.out_hidden_size = shape.text_config.hidden_size
    if reader := _VIDEOS.get(shape.model_type):
        own = (
            {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2} if shape.model_type.startswith("qwen") else {}
        )
        (folder / "video_preprocessor_config.json").write_text(_json({"video_processor_type": reader, **own}))


def folder_of(family: str, folder: Path, *, wide: bool = False) -> str:
    """Write a tiny model of a family with its tokenizer and its processor, and return its folder.

    `wide`: as vLLM's kernels for CPUs and its processors want it.
    """
    shape, words, processor, more = FAMILIES[family]()
    if wide:
        folder.mkdir()
        _widen(shape, folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoModelForImageTextToText.from_config(shape)
        for parameter in network.parameters():  # so that what is seen makes a difference
            if parameter.dim() > 1:
                parameter.data = parameter.data * 3 if parameter.any() else torch.randn(parameter.shape) / 4
    network.save_pretrained(folder)
    words.save_pretrained(folder)
    table = {"image_processor": processor.to_dict(), **more}
    (folder / "processor_config.json").write_text(_json(table))
    return str(folder)


def _json(table: Mapping[str, Any]) -> str:
    import json  # noqa: PLC0415

    return json.dumps(table, default=str)


def picture(seed: int, width: int = 24, height: int = 20) -> bytes:
    """Return a small PNG that depends on the seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
