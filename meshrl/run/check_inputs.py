"""Find mistakes in what a configuration reads: a role's model and a task's rows."""

import importlib.util
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from meshrl.errors import ConfigError, DataError, ModelError, shortened
from meshrl.hub import Repository, pinned
from meshrl.roles import ModelConfig, NewModel, PolicyConfig, SamplerConfig, Sampling, chosen_options, count_tokens
from meshrl.run.folder import read_json
from meshrl.run.scaffold import writer_of
from meshrl.tasks import TaskConfig, counted, dialogue, fill_answer, fill_prompt, load_quietly, read_rows

_FILE_ROWS: Final = 20_000
"""Rows of a file that are checked at most."""
_GENERATED_ROWS: Final = 100
"""Rows that are checked at most if rows are generated, because they are all alike. Of downloaded ones, one."""
_REPORTED: Final = 3
"""Rows that are reported at most for each kind of mistake."""


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
    described, template = Path(model) / "tokenizer_config.json", Path(model) / "chat_template.jinja"
    return not described.is_file() or bool(read_json(described).get("chat_template")) or template.is_file()


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
    shape = read_json(file)  # a damaged file is reported when the model loads
    inner = shape.get("text_config")
    longest = (inner if isinstance(inner, dict) else shape).get("max_position_embeddings")
    return longest if isinstance(longest, int) else None


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


def find_row_mistakes(
    task: TaskConfig, model: ModelConfig | None, sampling: Sampling | None, *, evaluates: bool = False
) -> list[str]:
    """Return mistakes in the first rows of a task. Files are read to the end unless they are long.

    Each row must be readable, fit the templates, and leave `model` room for `sampling.max_tokens`. If all rows are
    read, some must be left to train on, and some to evaluate with if the run `evaluates`.
    """
    mistakes: list[str] = []
    prompts: list[tuple[str, str]] = []  # the place of each row, and its prompt
    most = _most(task)
    for number, (where, row) in enumerate(islice(read_rows(task, None if _is_file(task) else most), most)):
        try:
            prompts.append((where, fill_prompt(task, row, where)))
            fill_answer(task, row, where)
            dialogue(task, number, row, where)
        except DataError as error:
            mistakes.append(str(error))
    if mistakes:
        return _first(mistakes)
    if model:
        mistakes += _unreadable(task, model, sampling, prompts)
    if not mistakes and task.max_prompt_tokens is not None:
        try:
            counted(task, [prompt for _, prompt in prompts])
        except (ConfigError, ModelError) as error:
            mistakes.append(str(error))
    if _is_file(task) and unchecked_rows(task) is None and not mistakes:
        try:
            held_out = load_quietly(task).held_out  # a run reports what it leaves out when it loads the task
        except DataError as error:
            return [str(error)]
        if evaluates and not len(held_out):
            mistakes.append(
                f"{task.source}: [evaluation] needs held-out prompts, and these rows have none: set task.held_out, "
                "give more rows, or remove [evaluation]"
            )
    return mistakes


def find_row_doubts(task: TaskConfig, prompts: int) -> list[str]:
    """Doubt a file with fewer training prompts than a batch of `prompts` needs. Its rows must be valid."""
    if not _is_file(task) or unchecked_rows(task) is not None:
        return []
    count = len(load_quietly(task).train)
    doubt = (
        f"prompts = {prompts}: {task.source} has {count} training prompts, so a batch has some of them more than once, "
        f"as separate groups: give more rows, or set prompts = {count}"
    )
    return [doubt] if count < prompts else []


def unchecked_rows(task: TaskConfig) -> str | None:
    """Say which rows of a task were checked, if not all."""
    most = _most(task)
    if _is_file(task) and next(islice(read_rows(task), most, None), None) is None:
        return None
    checked = "was checked" if most == 1 else f"{most:,} were checked"
    return f"of the task's rows, only the first {checked}"


def _most(task: TaskConfig) -> int:
    if _is_file(task):
        return _FILE_ROWS
    return _GENERATED_ROWS if task.source.startswith(("meshrl:", "reasoning_gym:")) else 1


def _is_file(task: TaskConfig) -> bool:
    return Path(task.source).suffix in {".jsonl", ".parquet"}


def _unreadable(
    task: TaskConfig, model: ModelConfig, sampling: Sampling | None, prompts: Sequence[tuple[str, str]]
) -> list[str]:
    """Return prompts with characters that the model lacks, and prompts that leave no room for a completion."""
    try:
        counts = count_tokens(model, [prompt for _, prompt in prompts])
    except ModelError as error:
        return [str(error)]
    if counts is None:
        return []
    longest, new = longest_of(model.model), sampling.max_tokens if sampling else 1
    room = None if longest is None else longest - new
    strange: list[str] = []
    long: list[str] = []
    for (where, prompt), count in zip(prompts, counts, strict=True):
        if isinstance(count, str):
            strange.append(f"{where}: {count}")
        elif room is not None and count > room and (task.max_prompt_tokens is None or count <= task.max_prompt_tokens):
            long.append(f"{where}: the prompt has {count} tokens: {shortened(prompt)}")
    remedy = (
        f"the model takes {longest} tokens, which with {new} new ones (sampling.max_tokens) leaves {room} for a "
        f"prompt: set task.max_prompt_tokens = {room} to leave longer ones out, or lower sampling.max_tokens"
    )
    return [*_first(strange), *_first(long), *([remedy] if long else [])]


def _first(mistakes: Sequence[str]) -> list[str]:
    more = len(mistakes) - _REPORTED
    return [*mistakes[:_REPORTED], *([f"and {more:,} more rows"] if more > 0 else [])]
