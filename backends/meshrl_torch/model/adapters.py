"""Folders of adapters that peft wrote: their base model, with the adapters merged into its weights."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from peft import PeftConfig, PeftModel
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from meshrl.errors import ModelError

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_TOLERANCE: Final = 1e-4
"""Largest difference of merged from unmerged outputs, as a part of the largest output."""


def is_adapter(folder: Path) -> bool:
    """True if a folder holds adapters, which transformers reads as their base model with them, whatever else it has."""
    return (folder / _CONFIG).is_file()


def merged(path: Path, folder_of: Callable[[str], Path], merge: Callable[[Path], Path]) -> Path:
    """Return what `merge` makes of the folder of the base model. ModelError says whose model cannot be read.

    `folder_of` returns the folder of a model by its name.
    """
    if not (path / _WEIGHTS).is_file():  # otherwise peft looks for it elsewhere
        raise ModelError(f"{path} has an {_CONFIG} and no {_WEIGHTS}: it is incomplete")
    kind = "LORA"
    try:
        described = PeftConfig.from_pretrained(str(path))
        kind = str(getattr(described.peft_type, "value", described.peft_type))
        if described.is_prompt_learning:
            raise ModelError(f"{kind} changes a model's input, not its weights, so it cannot be merged: take LORA")
        if not described.base_model_name_or_path:
            raise ModelError(f"{_CONFIG} names no base model: write base_model_name_or_path into it")
        return merge(folder_of("@".join(filter(None, (described.base_model_name_or_path, described.revision)))))
    except Exception as error:
        what = "adapters" if kind == "LORA" else f"adapters ({kind})"
        raise ModelError(f"{path} holds {what}, whose model cannot be read: {error}") from error


def read_merged(path: Path, base: Path, kind: type[Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model of a folder of adapters, in float32, and its tokenizer: its own, or that of the base model.

    `kind`: transformers' class that reads the base model if it generates.
    ModelError if the model would not compute what peft computes.
    """
    with warnings.catch_warnings():  # peft tells what is done here: tied weights are parted, Conv1D is transposed
        warnings.simplefilter("ignore")
        network = _merge(path, _base(path, base, PeftConfig.from_pretrained(str(path)), kind))
    tokens = path if any((path / f"tokenizer{end}").is_file() for end in (".json", ".model", "_config.json")) else base
    return network, cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(tokens, local_files_only=True))


def _base(path: Path, folder: Path, described: PeftConfig, kind: type[Any]) -> PreTrainedModel:
    """Return the base model, with as many tokens as the adapters' tensors, and a head apart from the embeddings.

    Rows that the adapters have to bring are NaN.
    """
    with safe_open(path / _WEIGHTS, framework="pt") as file:
        shapes = {name.removeprefix(_PREFIX): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    if described.task_type == "SEQ_CLS":
        labels = next((shape[0] for name, shape in shapes.items() if name.endswith("score.weight")), 1)
        loaded = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels, **options)
    else:
        loaded = kind.from_pretrained(folder, **options)
    network, report = cast("tuple[Any, Mapping[str, Iterable[str]]]", loaded)
    if lacks := sorted(set(report["missing_keys"]) - shapes.keys()):
        raise ModelError(f"the base model {folder} lacks {len(lacks)} tensors ({', '.join(lacks[:3])})")
    ends = [each for each in (network.get_input_embeddings(), network.get_output_embeddings()) if each is not None]
    names = {name: each for name, each in network.named_modules() if any(each is end for end in ends)}
    known = len(cast("torch.Tensor", ends[0].weight))
    sizes = {
        shape[dim]
        for name in names
        for kind, dim in (("weight", 0), ("base_layer.weight", 0), ("lora_embedding_A", 1), ("lora_B.weight", 0))
        if (shape := shapes.get(f"{name}.{kind}")) and (kind != "lora_B.weight" or names[name] is not ends[0])
    }
    if sizes and (most := max(sizes)) != known:
        network.resize_token_embeddings(most, mean_resizing=False)
        for name in names:
            nn.init.constant_(network.get_submodule(name).weight[known:].detach(), torch.nan)
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone())
    return cast("PreTrainedModel", network)


def _merge(path: Path, network: PreTrainedModel) -> PreTrainedModel:
    """Merge adapters into a model. ModelError if a tensor is left over or missing, or if it computes something else."""
    tied = bool(network.config.tie_word_embeddings)
    adapted = PeftModel.from_pretrained(network, str(path))
    report = adapted.load_adapter(str(path), "default")
    left = [name for name in report.unexpected_keys if ".modules_to_save." not in name]  # peft writes them twice
    for names, what in ((left, "fit no layer of the base model"), (report.missing_keys, "are not there")):
        if names:
            raise ModelError(f"{len(names)} tensors of {_WEIGHTS} {what} ({', '.join(sorted(names)[:3])})")
    ids = torch.arange(16)[None] % len(cast("torch.Tensor", network.get_input_embeddings().weight))
    with torch.no_grad():
        wanted = adapted.eval()(input_ids=ids).logits
        merged = cast("PreTrainedModel", adapted.merge_and_unload())
        found = merged.eval()(input_ids=ids).logits
    if lost := [name for name, each in merged.named_parameters() if each.isnan().any()]:
        raise ModelError(
            f"the adapters have more tokens than the base model, and no rows for them in {', '.join(lost)}"
        )
    if not torch.allclose(found, wanted, rtol=0, atol=_TOLERANCE * float(wanted.abs().max())):
        raise ModelError("merged into the weights, they compute something else than peft without merging")
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    weights = [cast("torch.Tensor", each.weight) for each in (head, embedding) if each is not None]
    tied = tied and head is not None and torch.equal(weights[0], weights[1])
    if tied and head is not None:
        head.weight = embedding.weight
    merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = tied
    return merged
