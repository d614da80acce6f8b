"""Heads of one number on a language model's body: the value at each token, or the score of a text at its last one."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

import numpy as np
from accelerate import init_empty_weights
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from meshrl import log
from meshrl.algo import Predicts
from meshrl.data import OUTCOMES, Batch, OnError, Ragged, with_rewards
from meshrl.errors import DataError, ModelError
from meshrl.roles import CriticConfig, ModelConfig, NewModel, RewardModelConfig, RewardTrainingConfig
from meshrl_torch.model.loading import CLASSIFIER, GENERATOR, Kind, folder_of
from meshrl_torch.model.making import MAKING
from meshrl_torch.model.network import LanguageModel, ready
from meshrl_torch.model.packing import MicroBatch, Rows, check_first, ends, learned
from meshrl_torch.model.rows import check_judged, judged, judged_tokens
from meshrl_torch.model.saving import VALUE_HEAD
from meshrl_torch.model.scoring import Passes, score, states
from meshrl_torch.model.text import texts_of

_SUFFIX: Final = "ForSequenceClassification"


def one_number(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Return a head's output, computed in float32, float32[tokens], from states [tokens, hidden]."""
    bias = cast("Tensor | None", head.bias)
    return linear(hidden.float(), head.weight.float(), None if bias is None else bias.float())[:, 0]


def predicted_scores(head: nn.Linear, model: LanguageModel, batch: Batch, micro: MicroBatch) -> Tensor:
    """Return the score of each text that ends in a micro-batch, float32[targets]."""
    return one_number(head, states(model, batch, micro))


def predicted_values(head: nn.Linear, model: LanguageModel, batch: Batch, micro: MicroBatch) -> Tensor:
    """Return the value of the state that each target of a micro-batch was sampled from, float32[targets]."""
    return cast("Tensor", head(states(model, batch, micro).float()))[:, 0]


def values(passes: Passes, batch: Batch) -> Ragged:
    """Return the value of the state that each learned token was sampled from, ragged float32. 0 for others."""
    tokens, mask = batch.tokens, batch.loss_mask

    def rows() -> Rows:
        check_first(tokens, mask)
        passes.model.check_rows(batch)
        return learned(tokens, mask, native=passes.model.native_tokens)

    return Ragged(score(passes, batch, rows, mask), tokens.offsets)


def value_head(model: LanguageModel, config: ModelConfig) -> nn.Linear:
    """Return the value head in the model's folder, or a new one whose values are 0: float32, for any body's dtype."""
    head = nn.Linear(int(model.network.config.get_text_config().hidden_size), 1)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    if isinstance(config.model, NewModel) or not (file := folder_of(config.model) / VALUE_HEAD).exists():
        return head
    remedy = "Save the critic again, or remove the file for a head that starts at 0"
    try:
        saved = load_file(file)
    except SafetensorError as error:
        raise ModelError(f"{file} cannot be read: {error}. {remedy}") from error
    shapes = {name: list(tensor.shape) for name, tensor in sorted(saved.items())}
    wanted = {"bias": [1], "weight": [1, head.in_features]}
    if shapes != wanted:
        raise ModelError(f"{file} is not a value head of this model: it has {shapes}, and not {wanted}. {remedy}")
    head.load_state_dict(saved)
    return head


class ScoreModel:
    """A sequence classifier with one label, with the handling of rows that it cannot score."""

    def __init__(self, model: LanguageModel, config: ModelConfig) -> None:
        """Raises ModelError if the model's head is not linear, or returns more than one number."""
        network = model.network
        head = getattr(network, "score", None)
        if not isinstance(head, nn.Linear):
            raise ModelError(
                f"model {config.model!r} is a {type(network).__name__}, whose head is not a linear layer named "
                "`score`: choose a decoder with such a head, LlamaForSequenceClassification or "
                "Qwen3ForSequenceClassification, for example"
            )
        if head.out_features != 1:
            labels = ", ".join(map(str, (network.config.id2label or {}).values()))
            raise ModelError(
                f"model {config.model!r} has {head.out_features} labels ({labels}): a reward model must have one, "
                "whose score is the reward"
            )
        self.model, self.head = model, head
        self._pad: int | None = network.config.get_text_config().pad_token_id
        self._warned = False
        self._on_error: OnError = config.errors if isinstance(config, RewardModelConfig) else "mask"

    def score(self, passes: Passes, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error` from the texts `prompt` and `completion`, with the model's tokenizer.

        With `chat`, they are two messages in its template. Without it, tokens are those of a policy's `encode`. A
        truncated completion is scored as if it ended there, because the model learned from whole texts. Scripts decide
        on the cost of truncation by the column `truncated`. A row has a `reward_error` if the tokenizer cannot encode
        it, if it is too long for the model, or if its score is not finite. `RewardModelConfig.errors` says what
        follows.
        """
        tokens, shared, errors = passes.ranks.together(lambda: self._read(batch))
        native = passes.model.native_tokens
        scores = score(passes, Batch.of(tokens=tokens), lambda: ends(tokens, shared, native=native), None)
        rewards = np.zeros(len(batch), np.float32)
        judged = np.flatnonzero(tokens.lengths)
        rewards[judged] = scores[tokens.offsets[judged + 1] - 1]
        for row in np.flatnonzero(~np.isfinite(rewards)).tolist():
            errors[row] = f"the score is {rewards[row]}, and a reward must be finite"
            rewards[row] = 0
        if errors and not self._warned:
            self._warned = True
            message = f"a row cannot be judged; it gets {OUTCOMES[self._on_error]}"
            log.warning(message, rows=len(errors), error=next(iter(errors.values())))
        return with_rewards(batch, rewards, [errors.get(row) for row in range(len(batch))], self._on_error)

    def encode(self, batch: Batch) -> Batch:
        """Add `tokens`, as `score` reads them, and `loss_mask`. See `judged`."""
        return judged(self.model, batch, self._pad)

    def _read(self, batch: Batch) -> tuple[Ragged, NDArray[np.int64], dict[int, str]]:
        """Return each row's tokens plus one (none if it cannot be scored), numbers of shared tokens, and errors.

        DataError for a completion that is not text.
        """
        texts_of(batch, "completion")
        rows: list[list[int]] = []
        errors: dict[int, str] = {}
        try:
            encoded = judged_tokens(self.model, batch, self._pad)
        except DataError:
            encoded = None
        for row in range(len(batch)):
            try:
                ids = encoded[row] if encoded else judged_tokens(self.model, batch.select([row]), self._pad)[0]
                check_judged(self.model, ids)
                rows.append([*ids, 0])
            except DataError as error:
                errors[row] = str(error)
                rows.append([])
        prompts = list(map(repr, batch.objects("prompt"))) if len(batch) else []
        return Ragged.of(rows, np.int32), _shared(prompts, rows), errors


def kind_of(config: ModelConfig) -> Kind:
    """Return the kind of a table's model: a reward model, which a frozen reward requires, or a language model."""
    if isinstance(config, RewardModelConfig):
        return CLASSIFIER
    if not isinstance(config, RewardTrainingConfig) or isinstance(config.model, NewModel):
        return GENERATOR
    folder = folder_of(config.model)
    written: Sequence[str] = ()
    with contextlib.suppress(Exception):  # the loader of the folder reports its errors
        written = AutoConfig.from_pretrained(folder, local_files_only=True).architectures or ()
    return CLASSIFIER if any(name.endswith(_SUFFIX) for name in written) else GENERATOR


def predicts_of(config: ModelConfig) -> Predicts:
    """Return what a table's role predicts of a token."""
    if isinstance(config, CriticConfig):
        return "values"
    return "scores" if isinstance(config, RewardModelConfig | RewardTrainingConfig) else "logprobs"


def with_score(model: LanguageModel, config: ModelConfig) -> ScoreModel:
    """Return a reward model as it is, or a language model's body with a new head whose scores are 0.

    ModelError if the architecture has no classifier with a linear head named `score`.
    """
    generator = model.network
    if type(generator).__name__.endswith(_SUFFIX):
        return ScoreModel(model, config)
    shape = generator.config
    shape.num_labels = 1
    if shape.pad_token_id is None:  # transformers finds a row's last token by it
        shape.pad_token_id = model.tokenizer.pad_token_id
    try:
        with MAKING, init_empty_weights():
            network = cast("PreTrainedModel", AutoModelForSequenceClassification.from_config(shape))
    except ValueError as error:
        raise ModelError(
            f"model {config.model!r} is a {type(generator).__name__}, and transformers has no sequence classifier of "
            "its architecture: take a Llama or a Qwen3, for example"
        ) from error
    body = generator.base_model
    setattr(network, network.base_model_prefix, body)
    head = getattr(network, "score", None)
    if isinstance(head, nn.Linear):
        network.score = nn.Linear(head.in_features, 1, bias=False, dtype=body.dtype)
        nn.init.zeros_(network.score.weight)
    scorer = ready(network, model.tokenizer, model.chat, model.layout.name)
    network.set_attn_implementation(model.layout.attention)
    return ScoreModel(
        replace(scorer, kernel=model.kernel, mixers=scorer.mixers or model.mixers, layout=model.layout), config
    )


def _shared(prompts: Sequence[str], rows: Sequence[list[int]]) -> NDArray[np.int64]:
    """Return how many tokens each row shares with all rows of its prompt at the beginning, int64[rows]."""
    families: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if rows[row]:
            families.setdefault(prompt, []).append(row)
    shared = np.zeros(len(rows), np.int64)
    for family in families.values():
        ordered = sorted(rows[row] for row in family)  # what the first and the last share, all share
        ends_at = (at for at, (one, other) in enumerate(zip(ordered[0], ordered[-1], strict=False)) if one != other)
        shared[family] = next(ends_at, len(ordered[0]))
    return shared
