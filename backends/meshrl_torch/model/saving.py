"""Model folders, written completely or not at all."""

import tempfile
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from safetensors.torch import save_file
from torch import Tensor

from meshrl.data import DEFAULT_ADAPTER
from meshrl.errors import ModelError
from meshrl_torch.model import lora
from meshrl_torch.model.adapted import Adapter
from meshrl_torch.model.loading import quiet
from meshrl_torch.model.network import LanguageModel

VALUE_HEAD: Final = "value_head.safetensors"
"""The file with a critic's head: `weight` float32[1, hidden] and `bias` float32[1]."""
_BASE: Final = "base"
"""The folder of adapters' base model, if transformers cannot open that by its name."""
_WHOLE: Final = "config.json"
_ADAPTER: Final = "adapter_config.json"
"""The files that prove a folder to be a model, or an adapter."""


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
        _write_whole(model, fresh, tensors)
        model.tokenizer.save_pretrained(fresh)
        if model.vision is not None:
            model.vision.save(fresh)
        if value_head is not None:
            save_file(dict(value_head), fresh / VALUE_HEAD)


def write_adapters(
    model: LanguageModel, folder: str, adapters: Mapping[str, Adapter], base: str | None, tensors: Mapping[str, Tensor]
) -> None:
    """Write adapters as peft does, with the tokenizer: one called "default" into the folder, others into their own.

    `base`: the name by which transformers opens their base model. None: it has none, and its `tensors` are written too.
    ModelError if the path exists and is no model, or has an adapter that is not among these.
    """
    with _replaced(folder, adapters) as fresh:
        if base is None:
            base = str(Path(folder).expanduser().absolute() / _BASE)
            _write_whole(model, fresh / _BASE, tensors)
            if model.vision is not None:
                model.vision.save(fresh / _BASE)
        for name, adapter in adapters.items():
            own = fresh if name == DEFAULT_ADAPTER else fresh / name
            own.mkdir(exist_ok=True, parents=True)
            lora.write(adapter, base, own, by_name=model.vision is not None)
            model.tokenizer.save_pretrained(own)


def _write_whole(model: LanguageModel, folder: Path, tensors: Mapping[str, Tensor] | None) -> None:
    model.network.save_pretrained(folder, state_dict=dict(tensors) if tensors else None)
    if tensors:  # perhaps of another dtype than the shards
        config = folder / "config.json"
        table = msgspec.json.decode(config.read_bytes(), type=dict[str, object])
        table["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        config.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2))


@contextmanager
def _replaced(folder: str, adapters: Collection[str] = ()) -> Generator[Path]:
    """Yield a temporary folder, and rename it at the end. Replaces an older model, or the same adapters."""
    target = Path(folder).expanduser()
    if target.exists():
        _check_replaceable(target, adapters)
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


def _check_replaceable(target: Path, adapters: Collection[str]) -> None:
    """Raise ModelError unless a path is an older model, empty, or has adapters of these names in folders and no more.

    Whatever else is there would be deleted.
    """
    own = {each.parent.name for each in target.glob(f"*/{_ADAPTER}")}
    if lost := sorted(own - {*adapters} | own & {DEFAULT_ADAPTER}):
        raise ModelError(
            f"cannot save to {target}: it has adapters that this save would delete and not write, in "
            f"{', '.join(lost)}. Choose a separate folder, or remove them first"
        )
    if target.is_dir():
        base = {_BASE} if (target / _BASE / _WHOLE).is_file() else set[str]()
        others = {each.name for each in target.iterdir()} - own - base
        if not others or any((target / name).is_file() for name in (_WHOLE, _ADAPTER)):
            return
    raise ModelError(f"cannot save to {target}: it has other files and no config.json. Choose a separate folder")
