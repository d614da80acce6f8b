"""Find mistakes in a role's model before it loads: its folder, chat template, memory and dtype."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from meshrl.errors import ConfigError, ModelError
from meshrl.hub import Repository, pinned
from meshrl.roles import ModelConfig, NewModel, PolicyConfig, SamplerConfig, Sampling, chosen_options
from meshrl.run.new import writer_of

_TEMPLATE: Final = "chat_template.jinja"


def checks_of_model(
    table: ModelConfig, policy: PolicyConfig | None, sampling: Sampling | None, *, converses: bool
) -> Iterator[Callable[[], object]]:
    """Yield the checks of a role's model, except the check of its path.

    `policy`: the policy whose weights a sampler loads. `converses`: agents talk to the model.
    """
    yield partial(check_chat, table, converses=converses and isinstance(table, SamplerConfig))
    if isinstance(table, SamplerConfig) and sampling:
        yield partial(check_room, table, sampling)
    if isinstance(table, SamplerConfig) and policy:
        yield partial(check_dtype, table, policy)
        yield partial(check_takes, table)


def check_chat(config: ModelConfig, *, converses: bool) -> None:
    """Raise ModelError if the model has no chat template but prompts are wrapped in one, or agents converse."""
    if not (config.chat or converses) or _has_template(config.model):
        return
    model = "a new model" if isinstance(config.model, NewModel) else config.model
    if converses:
        raise ModelError(
            f"agents need a chat template, and {model} has none: use an instruction-tuned model, or set "
            "model.chat_template of a new one"
        )
    raise ModelError(f"chat = true, but {model} has no chat template: use an instruction-tuned model, or chat = false")


def _has_template(model: str | NewModel) -> bool:
    """True if the model has a template, and also if it is not here to be looked at."""
    if isinstance(model, NewModel):
        return model.chat_template is not None
    described, template = Path(model) / "tokenizer_config.json", Path(model) / _TEMPLATE
    return not described.is_file() or bool(_json(described).get("chat_template")) or template.is_file()


def check_dtype(config: SamplerConfig, policy: PolicyConfig) -> None:
    """Raise ConfigError if a sampler computes in another dtype than the weights that it receives."""
    if config.dtype != policy.dtype:
        raise ConfigError(
            f'dtype = "{config.dtype}", but the policy publishes {policy.dtype}, which a sampler loads unchanged: '
            f'remove sampler.dtype to use the policy\'s, or set policy.dtype = "{config.dtype}"'
        )


def check_takes(config: SamplerConfig) -> None:
    """Raise ConfigError if a sampler takes no weights, but a policy publishes some."""
    if key := chosen_options(config).keeps_weights:
        raise ConfigError(
            f"{config.backend}.{key} is not set, so this sampler keeps its weights, but the policy publishes new "
            f"ones: set sampler.{config.backend}.{key}, or sample without a policy"
        )


def check_room(config: ModelConfig, sampling: Sampling) -> None:
    """Raise ConfigError if completions may exceed the model's longest sequence."""
    longest = longest_of(config.model)
    if longest is not None and sampling.max_tokens >= longest:
        raise ConfigError(
            f"sampling.max_tokens = {sampling.max_tokens}: the model takes at most {longest} tokens, prompt and "
            "completion together: lower it, or choose a model for longer texts"
        )


def longest_of(model: str | NewModel) -> int | None:
    """Return the model's longest sequence in tokens. None if its folder does not say."""
    if isinstance(model, NewModel):
        return model.max_tokens
    file = Path(model) / "config.json"
    shape = _json(file) if file.is_file() else {}
    inner = shape.get("text_config")
    found = (inner if isinstance(inner, dict) else shape).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _json(file: Path) -> Mapping[str, object]:
    """Read a table from a file. A damaged file gives an empty table, and is reported when the model loads."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError):
        return {}


def check_model(model: str) -> None:
    """Raise ModelError for a path that is neither a model folder nor a .gguf file, and an unknown name on the hub."""
    path = Path(model)
    if not path.exists() and Repository.of(model):
        pinned(model)
        return
    if model.startswith("package:"):
        package, _, inside = model.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pip_name = package.replace("_", "-")
            raise ModelError(f"model {model!r}: the package {package!r} is not installed: pip install {pip_name}")
        path = Path(spec.origin).parent / inside
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {model!r}: there is no file {path.resolve()}")
    elif not path.is_dir():
        writer = writer_of(path)
        hint = f"; `meshrl run {writer}` writes it" if writer else ""
        raise ModelError(f"model {model!r}: there is no folder {path.resolve()}{hint}")
    elif not any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ModelError(f"model {model!r}: {path.resolve()} has no config.json, so it is not the folder of a model")
