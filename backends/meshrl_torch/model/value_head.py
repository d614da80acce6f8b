"""A language model's body with a head that predicts the value at each token."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from meshrl.data import Batch, Ragged
from meshrl.errors import ModelError
from meshrl.roles import ModelConfig, NewModel
from meshrl_torch.model.files import folder_of
from meshrl_torch.model.loading import load
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.packing import MicroBatch, Rows, check_first, learned
from meshrl_torch.model.saving import VALUE_HEAD
from meshrl_torch.model.scoring import Passes, score


@dataclass(frozen=True)
class ValueModel:
    """A language model whose head is replaced by a linear one: float32, for any dtype of the body."""

    model: LanguageModel
    head: nn.Linear

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters of body and head, by name."""
        body = self.model.network.base_model.named_parameters(prefix="body")
        return dict(body) | dict(self.head.named_parameters(prefix="value_head"))

    def predicted(self, batch: Batch, micro: MicroBatch) -> Tensor:
        """Return the value of the state that each target of a micro-batch was sampled from, float32[targets]."""
        there = micro.to(self.model.device)
        hidden = self.model.hidden(there.ids, there.positions, there.attend)[0].index_select(0, there.source)
        return cast("Tensor", self.head(hidden.float()))[:, 0]


def values(passes: Passes, batch: Batch) -> Ragged:
    """Return the value of the state that each learned token was sampled from, ragged float32. 0 for others."""
    tokens, mask = batch.tokens, batch.loss_mask

    def rows() -> Rows:
        check_first(tokens, mask)
        passes.model.check_rows(batch)
        return learned(tokens, mask)

    return Ragged(score(passes, batch, rows, mask), tokens.offsets)


def load_valued(config: ModelConfig) -> ValueModel:
    """Load the model in a role's table, with the head in its folder, or a new one whose values are 0."""
    return with_head(load(config), config)


def with_head(model: LanguageModel, config: ModelConfig) -> ValueModel:
    """Add the head in the model's folder, or a new one whose values are 0."""
    head = nn.Linear(int(model.network.config.get_text_config().hidden_size), 1)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    if not isinstance(config.model, NewModel) and (file := folder_of(config.model) / VALUE_HEAD).exists():
        _restore(head, file)
    return ValueModel(model, head)


def _restore(head: nn.Linear, file: Path) -> None:
    remedy = "Save the critic again, or remove the file for a head that starts at 0"
    try:
        saved = load_file(file)
    except SafetensorError as error:
        raise ModelError(f"{file} cannot be read: {error}. {remedy}") from error
    found = {name: list(tensor.shape) for name, tensor in sorted(saved.items())}
    wanted = {"bias": [1], "weight": [1, head.in_features]}
    if found != wanted:
        raise ModelError(f"{file} is not a value head of this model: it has {found}, and not {wanted}. {remedy}")
    head.load_state_dict(saved)
