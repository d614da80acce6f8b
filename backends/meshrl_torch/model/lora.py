"""Named low-rank adapters on a frozen base: made like peft's, merged into the base's weights, and saved like peft."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, cast

import torch
from peft import LoraConfig as PeftConfig
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshrl.errors import ConfigError
from meshrl.hub import Repository
from meshrl.roles import LoraConfig
from meshrl_torch.model.adapted import BASE_LAYER, Adapted, Adapter, Adapters, LoraPair
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.vision import vision_modules

_DEFAULT: Final = "default"
"""The name of an adapter in the names of its tensors, which do not depend on its name here."""
_KINDS: Final = (nn.Linear, nn.Embedding, Conv1D)
"""The layers that get adapters. GPT-2's Conv1D is a linear layer whose matrix is transposed."""


def add_adapter(
    model: LanguageModel, name: str, config: LoraConfig, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Adapter:
    """Add an adapter to a network in place, without any effect yet. Its matrices have this dtype, on this device.

    ConfigError, and nothing changes, if a target names no layer, or one that cannot be adapted or published.
    """
    adapters, layers = cast("Adapters", model.adapters), _targets(model, config)
    random = torch.Generator().manual_seed(config.seed if config.seed is not None else seed)  # the same on all ranks
    pairs: dict[str, LoraPair] = {}
    parameters: dict[str, nn.Parameter] = {}
    for path, layer in layers.items():
        embeds, (rows, columns) = _kind_of(layer) is nn.Embedding, _shape_of(layer)
        down = torch.zeros(config.rank, columns, dtype=dtype)
        up = torch.zeros(rows, config.rank, dtype=dtype)
        if embeds:
            nn.init.normal_(up, generator=random)
        else:
            nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=random)
        made = nn.Parameter(down.to(device)), nn.Parameter(up.to(device))
        form = "{}.lora_embedding_{}.{}" if embeds else "{}.lora_{}.{}.weight"
        parameters |= {form.format(path, letter, _DEFAULT): each for letter, each in zip("AB", made, strict=True)}
        pairs[path] = LoraPair(*made, config.alpha / config.rank, _kind_of(layer) is nn.Linear)
    made_layers = {path: _adapted(model, adapters, path, layer) for path, layer in layers.items()}
    for path, layer in made_layers.items():
        layer.pairs[name] = pairs[path]
    split = [f"{path}.lora_{each.partial}.{_DEFAULT}.weight" for path, each in made_layers.items() if each.partial]
    in_head = any(layer.is_head for layer in made_layers.values())
    adapter = adapters.named[name] = Adapter(config, pairs, parameters, frozenset(split), in_head)
    return adapter


def _kind_of(layer: nn.Module) -> type[nn.Module]:
    base = layer.base_layer if isinstance(layer, Adapted) else layer
    return next(kind for kind in _KINDS if isinstance(base, kind))


def _shape_of(layer: nn.Module) -> tuple[int, int]:
    """Return the sizes of a layer's output and input. Those of an embedding are dims and tokens."""
    first, second = cast("Tensor", layer.weight).shape
    return (first, second) if _kind_of(layer) is nn.Linear else (second, first)


def _adapted(model: LanguageModel, adapters: Adapters, path: str, layer: nn.Module) -> Adapted:
    """Return a layer that takes adapters, in place of this one."""
    if isinstance(layer, Adapted):
        return layer
    owner, _, name = path.rpartition(".")
    is_head = all(each is not layer for each in model.body.modules())
    wrapped = Adapted(layer, adapters, is_head=is_head)
    setattr(model.network.get_submodule(owner), name, wrapped)
    if not owner:
        setattr(model.head, name, wrapped)
    return wrapped


def _targets(model: LanguageModel, config: LoraConfig) -> Mapping[str, nn.Module]:
    """Return the layers that get adapters, by their names in the original model.

    Of a model that sees, only its language model's, unless a regular expression names others. ConfigError for a target
    that is no layer, that cannot be adapted, or that cannot be published.
    """
    network = model.network
    modules = {name: each for name, each in network.named_modules() if not name.endswith(BASE_LAYER[:-1])}
    if model.vision is not None and (is_all_linear(config.targets) or not isinstance(config.targets, str)):
        vision = tuple(f"{name}." for name in vision_modules(network))
        modules = {name: each for name, each in modules.items() if not f"{name}.".startswith(vision)}
    layers = {name: each for name, each in modules.items() if isinstance(each, (Adapted, *_KINDS))}
    head = network.get_output_embeddings()
    if is_all_linear(config.targets):
        found = {name for name, each in layers.items() if each is not head and _kind_of(each) is not nn.Embedding}
    elif isinstance(config.targets, str):
        found = _matching(network, layers, modules, config.targets, partial(_fullmatch, config.targets))
    else:
        found = {
            name
            for target in config.targets
            for name in _matching(network, layers, modules, target, partial(_is_named, target))
        }
    users: dict[int, list[str]] = {}
    for name, each in layers.items():
        users.setdefault(id(each.weight), []).append(name)
    for shared in users.values() if config.sync == "merged" else ():
        named = [each for each in shared if each in found]
        if named and len(shared) > 1:
            others = ", ".join(each for each in shared if each != named[0])
            raise ConfigError(
                f"lora.targets: {named[0]} shares its weight with {others} in this model, and a merged weight could "
                'not be that of both: set lora.sync = "adapters" for a sampler of the backend "torch", or leave it out'
            )
    return {name: each for name, each in layers.items() if name in found}


def _matching(
    network: nn.Module,
    layers: Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    target: str,
    matches: Callable[[str], bool],
) -> set[str]:
    """Return the names of layers that a target names. ConfigError if it names none, or something else."""
    found = {name for name in modules if matches(name)}
    others = sorted(found - layers.keys())
    if not found or others:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        other = f"is a {type(modules[others[0]]).__name__}, which takes no adapters" if others else ""
        raise ConfigError(
            f"lora.targets: {target!r} {other or 'is the name of no layer'} of {type(network).__name__}. Its layers "
            f'are {names}; a text in place of a list is "all-linear", or a regular expression of whole names'
        )
    return found


def _is_named(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _fullmatch(target: str, name: str) -> bool:
    try:
        return re.fullmatch(target, name) is not None
    except re.error as error:
        raise ConfigError(f"lora.targets = {target!r} is no regular expression: {error}") from error


def is_all_linear(targets: str | tuple[str, ...]) -> bool:
    """True if targets are all linear layers except the head."""
    return not targets or (isinstance(targets, str) and targets.lower() == "all-linear")


def merged(tensors: Iterable[tuple[str, Tensor]], adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Yield a base's tensors with an adapter: W + alpha / rank * B A, in W's dtype."""
    for name, tensor in tensors:
        path, _, kind = name.rpartition(".")
        pair = adapter.pairs.get(path) if kind == "weight" else None
        if pair is None:
            yield name, tensor
            continue
        change = pair.up.detach().float() @ pair.down.detach().float()
        if not pair.is_linear:
            change = change.T
        yield name, (tensor.float() + pair.scale * change.to(tensor.device)).to(tensor.dtype)


def write(adapter: Adapter, base: str, folder: Path, *, by_name: bool) -> None:
    """Write the two files that `PeftModel.from_pretrained` reads. `base`: the model that the adapter belongs to.

    `by_name`: name each layer, because other layers have the same kind or the last part of a name.
    """
    named = {
        f"base_model.model.{f'{name}.'.replace(f'.{_DEFAULT}.', '.')[:-1]}": tensor.detach().cpu().contiguous()
        for name, tensor in adapter.parameters.items()
    }
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = adapter.config
    targets = config.targets if isinstance(config.targets, str) else list(config.targets)
    targets = [*adapter.pairs] if by_name else targets
    peft = PeftConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets or "all-linear", task_type="CAUSAL_LM"
    )
    peft.base_model_name_or_path, peft.revision = Repository.of(base) or (base, None)
    peft.inference_mode = True
    peft.save_pretrained(str(folder))
