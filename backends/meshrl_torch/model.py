"""A causal language model and its tokenizer, loaded whole, and the forward pass over packed sequences."""

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import logging as transformers_logging

from meshrl.errors import DataError, ModelError
from meshrl.roles import ModelConfig, NewModel
from meshrl_torch import attention
from meshrl_torch.attention import Attend, Group, Packed
from meshrl_torch.files import folder_of
from meshrl_torch.text import character_tokenizer, end_token

MAX_LOGITS: Final = 1 << 25
"""Logits held at once, 128 MiB in float32; more are made in chunks, and made again for the backward pass."""


@dataclass(frozen=True)
class LanguageModel:
    """A model, its tokenizer, and what the roles ask of both."""

    network: PreTrainedModel
    head: PreTrainedModel
    """The same model without its body: what it makes of the last hidden states, parameters shared."""
    tokenizer: PreTrainedTokenizerBase
    chat: bool
    ends: frozenset[int]
    """The tokens that end a text."""
    max_tokens: int
    """The longest sequence the model was made for."""

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last hidden states [batch, tokens, hidden] of ids and positions, int64[batch, tokens]."""
        body = self.network.base_model
        output = body(input_ids=ids, position_ids=positions, use_cache=False, attend=attend)
        return cast("Tensor", output.last_hidden_state)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[tokens, vocabulary] from hidden states [tokens, hidden]."""
        output = self.head(inputs_embeds=hidden[None], use_cache=False)
        return cast("Tensor", output.logits)[0].float()

    def logprobs(self, hidden: Tensor, chosen: Tensor, temperature: Tensor | None) -> Tensor:
        """The log-probability of each chosen token, float32[tokens], at a temperature for each.

        `hidden` is [tokens, hidden], of the tokens that predict. With more than MAX_LOGITS logits it goes
        chunk by chunk, so that memory does not grow with tokens times vocabulary.
        """
        rows = max(1, MAX_LOGITS // int(self.network.config.get_text_config().vocab_size))
        if len(hidden) <= rows:
            return self._chosen(hidden, chosen, temperature)
        pieces: list[Tensor] = []
        for start in range(0, len(hidden), rows):
            span = slice(start, start + rows)
            scale = None if temperature is None else temperature[span]
            piece = checkpoint(self._chosen, hidden[span], chosen[span], scale, use_reentrant=False)
            pieces.append(cast("Tensor", piece))
        return torch.cat(pieces)

    def _chosen(self, hidden: Tensor, chosen: Tensor, temperature: Tensor | None) -> Tensor:
        logits = self.logits(hidden)
        if temperature is not None:
            logits = logits / temperature[:, None]
        return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]

    def check_lengths(self, longest: int, what: str) -> None:
        """DataError if a sequence is longer than the model was made for."""
        if longest > self.max_tokens:
            raise DataError(
                f"{what} has {longest} tokens and the model takes at most {self.max_tokens}: shorten the row, or "
                "take a model made for longer texts"
            )

    def tensors(self) -> Mapping[str, Tensor]:
        """The model's parameters and saved buffers by name, a tied one once. Writing into them changes it."""
        seen: set[int] = set()
        return {
            name: tensor
            for name, tensor in cast("dict[str, Tensor]", self.network.state_dict()).items()
            if not (tensor.data_ptr() in seen or seen.add(tensor.data_ptr()))
        }


def load(config: ModelConfig) -> LanguageModel:
    """The model that a role's table names, in its dtype, with nothing random in its forward pass."""
    dtype = cast("torch.dtype", getattr(torch, config.dtype))
    if isinstance(config.model, NewModel):
        network, tokenizer = _new(config.model, config.seed)
        network = network.to(dtype)
    else:
        with _quiet():
            folder = folder_of(config.model)
            network, tokenizer = _read(config.model, folder, dtype)
    return _ready(network, tokenizer, config.chat)


def _ready(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: bool) -> LanguageModel:
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the sampler's log-probs must be the trainer's
    network.eval()
    network.set_attn_implementation(attention.NAME)
    config = network.config.get_text_config()
    ends = getattr(network.generation_config, "eos_token_id", None)
    stops = {ends} if isinstance(ends, int) else set(ends or ())
    model = LanguageModel(
        network=network,
        head=_headless(network),
        tokenizer=tokenizer,
        chat=chat,
        ends=frozenset(stops | {end_token(tokenizer)}),
        max_tokens=int(getattr(config, "max_position_embeddings", None) or (1 << 62)),
    )
    embeddings = network.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embeddings:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path} has {len(tokenizer)} tokens and the model {embeddings}: they "
            "are not of one model"
        )
    _check_packing(model)
    return model


def _new(spec: NewModel, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = character_tokenizer(spec.characters, spec.max_tokens)
    if spec.hidden_size % (2 * spec.heads):
        raise ModelError(
            f"model.hidden_size {spec.hidden_size} over model.heads {spec.heads} is {spec.hidden_size / spec.heads:g} "
            "dims a head: it must be an even number"
        )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        max_position_embeddings=spec.max_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config), tokenizer


def _read(name: str, folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        network, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise ModelError(
            f"model {name!r}: cannot be loaded as a causal language model: {_first_line(error)}"
        ) from error
    written = getattr(network.config, "architectures", None) or ()
    if written and not any(type(network).__name__ == each for each in written):
        raise ModelError(f"model {name!r} is a {written[0]}, not a causal language model: it cannot generate")
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"model {name!r}: its files lack {len(missing)} tensors ({', '.join(missing[:3])}, ...), which would be "
            "random: the folder is incomplete or of another architecture"
        )
    try:
        return network, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"model {name!r}: the folder's tokenizer cannot be loaded (tokenizer.json or tokenizer.model and "
            f"tokenizer_config.json belong beside config.json): {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and advice from transformers while a model loads: what is wrong is raised."""
    level, bar = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bar:
            transformers_logging.enable_progress_bar()


class _Given(nn.Module):
    """Stands where a model's body was: its hidden states are given."""

    def forward(self, inputs_embeds: Tensor, **_: object) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def _headless(network: PreTrainedModel) -> PreTrainedModel:
    """The network with its body taken out, so that its own code (scaling, capping) makes the logits."""
    if network.base_model is network:
        raise ModelError(f"{type(network).__name__} has no body apart from its head")
    head = copy.copy(network)
    head.__dict__["_modules"] = {**network._modules, network.base_model_prefix: _Given()}  # noqa: SLF001
    return head


def _check_packing(model: LanguageModel) -> None:
    """ModelError for an architecture whose sequences see each other when packed, or that ignores positions."""
    ids, positions = torch.tensor([[2, 3, 4, 5, 6, 2, 3]]), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    ids %= model.network.get_input_embeddings().weight.shape[0]
    name = type(model.network).__name__
    try:
        with torch.no_grad():
            packed = model.hidden(ids, positions, Packed((Group(1, 3, 3), Group(1, 4, 4))))[0, 3:]
            alone = model.hidden(ids[:, 3:], positions[:, 3:], Packed((Group(1, 4, 4),)))[0]
    except TypeError as error:
        raise ModelError(f"{name} does not take the keywords of packed sequences: {error}") from error
    tolerance = math.sqrt(torch.finfo(packed.dtype).eps)
    if not torch.allclose(packed, alone, rtol=0, atol=tolerance * float(alone.abs().max())):
        raise ModelError(
            f"{name} lets packed sequences see each other (a state-space layer, an attention of its own or positions "
            "that do not restart): the torch backend cannot train it"
        )
