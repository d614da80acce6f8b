"""Low-rank adapters, through peft. Only they are trained, and the model's own parameters are frozen."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn

from meshrl.errors import ConfigError
from meshrl.hub import Repository
from meshrl.roles import LoraConfig, PolicyConfig
from meshrl_torch.model.network import LanguageModel

T = TypeVar("T", bound=Tensor)

_NAME: Final = "default"
_BASE: Final = ".base_layer."
_ADAPTER: Final = ".lora_"


def prepare(model: LanguageModel, config: PolicyConfig) -> None:
    """Prepare a policy's model in place, with its adapters, and activation checkpointing if configured."""
    adapt(model, config.lora, config.seed)
    if config.activation_checkpointing:
        model.network.activation_checkpointing_enable({"use_reentrant": False})
        model.network.train(True)  # required by transformers; its dropout is zero


def adapt(model: LanguageModel, config: LoraConfig | None, seed: int) -> None:
    """Add adapters to a model in place, without any effect yet. ConfigError if it has none of the layers."""
    if config is None:
        return
    network = model.network
    try:
        inject_adapter_in_model(_peft(config), network, adapter_name=_NAME)
    except ValueError as error:
        raise ConfigError(f"lora.targets = {list(config.targets)}: {error}") from error
    # Drawn here, so that all ranks get the same, even if the model has no values yet.
    random = torch.Generator().manual_seed(seed)
    for name, parameter in adapters(dict(network.named_parameters())).items():
        values = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=random)
        network.get_submodule(name.removesuffix(".weight")).register_parameter("weight", nn.Parameter(values))


def trained(model: LanguageModel) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name: only the adapters, if there are any."""
    return {name: each for name, each in model.network.named_parameters() if each.requires_grad}


def own_name(name: str) -> str:
    """Return the name in the original model of an adapted model's parameter."""
    return name.replace(_BASE, ".")


def adapters(tensors: Mapping[str, T]) -> dict[str, T]:
    """Select the adapters among an adapted model's tensors."""
    return {name: tensor for name, tensor in tensors.items() if _ADAPTER in name}


def merged(tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Convert an adapted model's tensors to those of the original model: W + alpha / rank * B A, in W's dtype."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _ADAPTER in name:
            continue
        path, _, kind = name.rpartition(_BASE)
        if path and kind == "weight":
            down, up = (tensors[f"{path}.lora_{letter}.{_NAME}.weight"].float() for letter in "AB")
            tensor = (tensor.float() + config.alpha / config.rank * (up @ down)).to(tensor.dtype)  # noqa: PLW2901
        result[own_name(name)] = tensor
    return result


def write(tensors: Mapping[str, Tensor], config: LoraConfig, base: str, folder: Path) -> None:
    """Write the two files that `PeftModel.from_pretrained` reads. `base`: the model they belong to."""
    named = {
        f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor.contiguous()
        for name, tensor in adapters(tensors).items()
    }
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft = _peft(config)
    peft.base_model_name_or_path, peft.revision = Repository.of(base) or (base, None)
    peft.inference_mode = True
    peft.save_pretrained(str(folder))


def _peft(config: LoraConfig) -> PeftConfig:
    targets = "all-linear" if not config.targets else list(config.targets)
    return PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM")
