"""Low-rank adapters, through peft. Only they are trained, and the model's own parameters are frozen."""

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshrl.errors import ConfigError
from meshrl.hub import Repository
from meshrl.roles import LoraConfig, PolicyConfig
from meshrl_torch.model.network import LanguageModel, headless

T = TypeVar("T", bound=Tensor)

_NAME: Final = "default"
_BASE: Final = ".base_layer."
_ADAPTER: Final = ".lora_"
_KINDS: Final = (nn.Linear, nn.Embedding, Conv1D)
"""The layers that get adapters. GPT-2's Conv1D is a linear layer whose matrix is transposed."""


def prepare(model: LanguageModel, config: PolicyConfig) -> LanguageModel:
    """Prepare a policy's network in place, with its adapters, and activation checkpointing if configured."""
    model = adapt(model, config.lora, config.seed)
    if config.activation_checkpointing:
        model.network.activation_checkpointing_enable({"use_reentrant": False})
        model.network.train(True)  # required by transformers; its dropout is zero
    return model


def adapt(model: LanguageModel, config: LoraConfig | None, seed: int) -> LanguageModel:
    """Add adapters to a network in place, without any effect yet, and return its model with them.

    ConfigError if a target names no layer, or one that cannot be adapted or published.
    """
    if config is None:
        return model
    network = model.network
    with warnings.catch_warnings():  # peft tells that it transposes Conv1D, and that tied layers are adapted apart
        warnings.filterwarnings("ignore", "fan_in_fan_out is set", UserWarning)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
        try:
            _check_targets(network, config)
            inject_adapter_in_model(_peft(config), network, adapter_name=_NAME)
        except (ValueError, re.error) as error:
            raise ConfigError(f"lora.targets = {config.targets!r}: {error}") from error
    # Drawn here, so that all ranks get the same, even if the model has no values yet.
    random = torch.Generator().manual_seed(seed)
    for name, parameter in adapters(dict(network.named_parameters())).items():
        values = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=random)
        elif ".lora_embedding_B." in name:
            nn.init.normal_(values, generator=random)
        owner, _, kind = name.rpartition(".")
        setattr(network.get_submodule(owner), kind, nn.Parameter(values))
    return replace(model, head=headless(network))


def _check_targets(network: nn.Module, config: LoraConfig) -> None:
    """Raise ConfigError for a target that peft would leave out, that it cannot adapt, or that cannot be published."""
    layers = {name: each for name, each in network.named_modules() if isinstance(each, _KINDS)}
    names = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
    for target in config.targets if isinstance(config.targets, tuple) else ():
        found = [each for name, each in network.named_modules() if name == target or name.endswith(f".{target}")]
        if not found or not all(isinstance(each, _KINDS) for each in found):
            what = f"is a {type(found[0]).__name__}, which takes no adapters" if found else "is the name of no layer"
            raise ConfigError(
                f"lora.targets: {target!r} {what} of {type(network).__name__}. Its layers are {names}; a text in place "
                'of a list is "all-linear", or a regular expression of whole names'
            )
    parameters = dict(network.named_parameters(remove_duplicate=False))
    users: dict[int, list[str]] = {}
    for name in layers:
        users.setdefault(id(parameters[f"{name}.weight"]), []).append(name)
    for shared in users.values() if config.sync == "merged" else ():
        named = [each for each in shared if check_target_module_exists(_peft(config), each)]
        if named and len(shared) > 1:
            others = ", ".join(each for each in shared if each != named[0])
            raise ConfigError(
                f"lora.targets: {named[0]} shares its weight with {others} in this model, and a merged weight could "
                'not be that of both: set lora.sync = "adapters" for a sampler of the backend "torch", or leave it out'
            )


def trained(model: LanguageModel) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name: only the adapters, if there are any."""
    return {name: each for name, each in model.network.named_parameters() if each.requires_grad}


def own_name(name: str) -> str:
    """Return the name in the original model of an adapted model's parameter."""
    return name.replace(_BASE, ".")


def adapters(tensors: Mapping[str, T]) -> dict[str, T]:
    """Select the adapters among an adapted model's tensors."""
    return {name: tensor for name, tensor in tensors.items() if _ADAPTER in name}


def base_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors of the original model among an adapted model's, by their names there."""
    return {own_name(name): tensor for name, tensor in tensors.items() if _ADAPTER not in name}


def merged(network: nn.Module, tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Convert an adapted network's tensors to those of the original one: W + alpha / rank * B A, in W's dtype."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _ADAPTER in name:
            continue
        path, _, kind = name.rpartition(_BASE)
        if path and kind == "weight":
            base = network.get_submodule(f"{path}.base_layer")
            pair = "lora_embedding_{}.{}" if isinstance(base, nn.Embedding) else "lora_{}.{}.weight"
            down, up = (tensors[f"{path}.{pair.format(letter, _NAME)}"].float() for letter in "AB")
            change = up @ down if isinstance(base, nn.Linear) else (up @ down).T
            tensor = (tensor.float() + config.alpha / config.rank * change).to(tensor.dtype)  # noqa: PLW2901
        result[own_name(name)] = tensor
    return result


def write(tensors: Mapping[str, Tensor], config: LoraConfig, base: str, folder: Path) -> None:
    """Write the two files that `PeftModel.from_pretrained` reads. `base`: the model they belong to."""
    named = {
        f"base_model.model.{f'{name}.'.replace(f'.{_NAME}.', '.')[:-1]}": tensor.contiguous()
        for name, tensor in adapters(tensors).items()
    }
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft = _peft(config)
    peft.base_model_name_or_path, peft.revision = Repository.of(base) or (base, None)
    peft.inference_mode = True
    peft.save_pretrained(str(folder))


def _peft(config: LoraConfig) -> PeftConfig:
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    targets = targets or "all-linear"
    return PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, task_type="CAUSAL_LM")
