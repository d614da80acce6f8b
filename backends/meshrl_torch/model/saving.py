"""Model folders, written completely or not at all."""

import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshrl.errors import ModelError
from meshrl.roles import PolicyConfig
from meshrl_torch.model import lora
from meshrl_torch.model.loading import quiet
from meshrl_torch.model.network import LanguageModel

VALUE_HEAD: Final = "value_head.safetensors"
"""The file with a critic's head: `weight` float32[1, hidden] and `bias` float32[1]."""


def write(
    model: LanguageModel,
    folder: str,
    value_head: Mapping[str, Tensor] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a Hugging Face folder. `tensors`: the model's tensors, if it has only shards of them.

    A value head gets its own file, which other readers of the model ignore. ModelError if the path exists and is no
    model.
    """
    with _replaced(folder) as fresh:
        model.network.save_pretrained(fresh, state_dict=dict(tensors) if tensors else None)
        if tensors:  # perhaps of another dtype than the shards
            _tell_dtype(fresh / "config.json", next(iter(tensors.values())).dtype)
        model.tokenizer.save_pretrained(fresh)
        if value_head is not None:
            save_file(dict(value_head), fresh / VALUE_HEAD)


def write_adapters(model: LanguageModel, folder: str, tensors: Mapping[str, Tensor], config: PolicyConfig) -> None:
    """Write the adapters among these tensors as peft does, with the tokenizer. ModelError as for `write`."""
    if config.lora is None:
        raise ModelError("the model has no adapters")
    base = config.model if isinstance(config.model, str) else ""
    with _replaced(folder) as fresh:
        fresh.mkdir()
        lora.write(tensors, config.lora, base, fresh)
        model.tokenizer.save_pretrained(fresh)


def _tell_dtype(config: Path, dtype: torch.dtype) -> None:
    table = msgspec.json.decode(config.read_bytes(), type=dict[str, object])
    table["dtype"] = str(dtype).removeprefix("torch.")
    config.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2))


@contextmanager
def _replaced(folder: str) -> Generator[Path]:
    """Yield a temporary folder, and rename it at the end. Replaces an older model."""
    target = Path(folder).expanduser()
    if target.exists() and not _replaceable(target):
        raise ModelError(f"cannot save to {target}: it has other files and no config.json. Choose a separate folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as beside:
        fresh = Path(beside, "new")
        with quiet():
            yield fresh
        old = Path(beside, "old")
        if target.exists():
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise


def _replaceable(target: Path) -> bool:
    known = ("config.json", "adapter_config.json")
    return target.is_dir() and (any((target / name).exists() for name in known) or not any(target.iterdir()))
