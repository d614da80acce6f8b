"""Model folders, written completely or not at all."""

import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from meshrl.errors import ModelError
from meshrl.roles import PolicyConfig
from meshrl_torch.model import lora
from meshrl_torch.model.loading import opens, quiet
from meshrl_torch.model.network import LanguageModel

VALUE_HEAD: Final = "value_head.safetensors"
"""The file with a critic's head: `weight` float32[1, hidden] and `bias` float32[1]."""
_BASE: Final = "base"
"""The folder of adapters' base model, if transformers cannot open that by its name."""


def write(
    model: LanguageModel,
    folder: str,
    value_head: Mapping[str, Tensor] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    adapted: PolicyConfig | None = None,
) -> None:
    """Write a Hugging Face folder. `tensors`: the model's tensors, if it has only shards of them.

    A value head gets its own file, which other readers of the model ignore. `adapted`: write only the adapters of this
    table, as peft does, with the tokenizer, and their base model if transformers cannot open it by its name. ModelError
    if the path exists and is no model.
    """
    with _replaced(folder) as fresh:
        if adapted and adapted.lora:
            tensors, base = tensors or model.tensors(), opens(adapted.model)
            if base is None:
                base = str(Path(folder).expanduser().absolute() / _BASE)
                _write_whole(model, fresh / _BASE, lora.base_of(tensors))
            fresh.mkdir(exist_ok=True)
            lora.write(tensors, adapted.lora, base, fresh)
        else:
            _write_whole(model, fresh, tensors)
        model.tokenizer.save_pretrained(fresh)
        if value_head is not None:
            save_file(dict(value_head), fresh / VALUE_HEAD)


def _write_whole(model: LanguageModel, folder: Path, tensors: Mapping[str, Tensor] | None) -> None:
    model.network.save_pretrained(folder, state_dict=dict(tensors) if tensors else None)
    if tensors:  # perhaps of another dtype than the shards
        config = folder / "config.json"
        table = msgspec.json.decode(config.read_bytes(), type=dict[str, object])
        table["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        config.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2))


@contextmanager
def _replaced(folder: str) -> Generator[Path]:
    """Yield a temporary folder, and rename it at the end. Replaces an older model."""
    target = Path(folder).expanduser()
    models = [target / "config.json", target / "adapter_config.json"]
    if target.exists() and not (target.is_dir() and (any(map(Path.exists, models)) or not any(target.iterdir()))):
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
