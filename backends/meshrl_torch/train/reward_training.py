"""A trained reward model: its initial weights, the tokens that it scores, and its optimizer step."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

import numpy as np
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from meshrl.algo import Loss, check_predicts
from meshrl.data import Batch, Metrics, Ragged, check_lengths
from meshrl.errors import DataError, ModelError
from meshrl.roles import ModelConfig, NewModel, RewardModelConfig
from meshrl_torch.model.files import folder_of
from meshrl_torch.model.loading import GENERATOR, JUDGE, Kind, load
from meshrl_torch.model.network import LanguageModel, ready
from meshrl_torch.model.packing import Rows, learned
from meshrl_torch.model.reward_head import ScoreModel
from meshrl_torch.model.scoring import Passes, score
from meshrl_torch.model.text import encode_prompts, encode_texts, end_token, texts_of
from meshrl_torch.train.trainable import Trainable

_CLASSIFIER: Final = "ForSequenceClassification"


def load_judge(config: ModelConfig) -> ScoreModel:
    """Load the reward model in a role's table, or a language model with a new head whose scores are 0."""
    kind = kind_of(config)
    return with_score(load(config, kind), config)


def kind_of(config: ModelConfig) -> Kind:
    """Return the kind of a table's model: a reward model, which a frozen reward requires, or a language model."""
    if isinstance(config, RewardModelConfig):
        return JUDGE
    if isinstance(config.model, NewModel):
        return GENERATOR
    folder = folder_of(config.model)
    written: Sequence[str] = ()
    with contextlib.suppress(Exception):  # the loader of the folder reports its errors
        written = AutoConfig.from_pretrained(folder, local_files_only=True).architectures or ()
    return JUDGE if any(name.endswith(_CLASSIFIER) for name in written) else GENERATOR


def with_score(model: LanguageModel, config: ModelConfig) -> ScoreModel:
    """Return a reward model as it is, or a language model's body with a new head whose scores are 0.

    ModelError if the architecture has no classifier with a linear head named `score`.
    """
    generator = model.network
    if type(generator).__name__.endswith(_CLASSIFIER):
        return ScoreModel(model, config)
    shape = generator.config
    shape.num_labels = 1
    if shape.pad_token_id is None:  # transformers finds a row's last token by it
        shape.pad_token_id = model.tokenizer.pad_token_id
    try:
        with init_empty_weights():
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
    return ScoreModel(replace(ready(network, model.tokenizer, model.chat), kernel=model.kernel), config)


def encoded(judge: ScoreModel, batch: Batch) -> Batch:
    """Add `tokens` and `loss_mask`, from `steps` or else from completions.

    DataError for a row that the model cannot read, that has no step, or that has a step without tokens.
    """
    if "steps" not in batch:
        return judge.encode(batch)
    if judge.model.chat is not None:
        raise DataError(
            "`steps` are tokenised one by one, which a chat template does not: set chat = false and write the "
            "template's marks into `task.prompt`, or leave `steps` out"
        )
    tokenizer = judge.model.tokenizer
    end = end_token(tokenizer)
    rows: list[Sequence[int]] = []
    scored: list[list[int]] = []
    steps = _texts(batch.objects("steps") if len(batch) else ())
    prompts = encode_prompts(tokenizer, texts_of(batch, "prompt"), chat=None)
    for row, (prompt, own) in enumerate(zip(prompts, steps, strict=True)):
        pieces = encode_texts(tokenizer, own)
        if not pieces or not all(pieces):
            raise DataError(f"row {row} has the steps {own!r}: each needs a token, at which it is scored")
        ends_at = len(prompt) + np.cumsum([len(piece) for piece in pieces]) - 1
        rows.append(judge.judged([*prompt, *(token for piece in pieces for token in piece), end]))
        scored.append([*ends_at[:-1].tolist(), len(rows[-1]) - 1])
    return judge.marked(batch, rows, scored)


def _texts(steps: Sequence[object]) -> list[list[str]]:
    """Return the steps of each row."""
    for row, own in enumerate(steps):
        if not isinstance(own, Sequence) or isinstance(own, str) or not all(isinstance(each, str) for each in own):
            raise DataError(f"`steps` of row {row} is {own!r}: give a list of texts, one for each step")
    return [[str(each) for each in cast("Sequence[object]", own)] for own in steps]


def token_scores(judge: ScoreModel, passes: Passes, batch: Batch) -> Batch:
    """Add `token_scores`: the score at each token where `loss_mask` is True, 0 elsewhere."""
    kept: list[Batch] = []
    passes.ranks.agree(lambda: kept.append(_read_after(judge, batch, ())))
    after = kept[0]
    tokens, mask = after.tokens, after.loss_mask

    def rows() -> Rows:
        return learned(tokens, mask)

    values = score(passes, after, rows, mask)
    return batch.assign(token_scores=Ragged(np.delete(values, tokens.offsets[:-1]), batch.tokens.offsets))


async def step(judge: ScoreModel, model: Trainable, batch: Batch, loss: Loss) -> Metrics:
    """Make one optimizer step like the model's own, with the same errors.

    DataError on all ranks, too, if the loss is not of scores, or if the batch lacks a column that it reads.
    """
    ranks = model.passes.ranks
    kept: list[Batch] = []

    def prepare() -> None:
        check_predicts(loss, "scores")
        kept.append(_read_after(judge, batch, loss.columns))

    ranks.agree(prepare)
    told = await model.step(kept[0], loss, lambda: None)
    return Metrics({**told.entries, "tokens": (len(batch.tokens.values), 1 / ranks.size)})  # before the shift


def _read_after(judge: ScoreModel, batch: Batch, names: Sequence[str]) -> Batch:
    """Shift the batch's tokens, mask and these columns, so that each token carries the data of the previous one.

    A token's log-prob depends on the tokens before it, a score also on its own token. So each row gets one more token,
    which is never read, and a token's data moves to the next.
    """
    judge.model.check_rows(batch)
    tokens = batch.tokens
    begins, ends = tokens.offsets[:-1], tokens.offsets[1:]
    offsets = tokens.offsets + np.arange(len(tokens) + 1)
    moved = {"tokens": Ragged(np.insert(tokens.values, ends, 0), offsets)}
    rows: list[str] = []
    for name in ("loss_mask", *names):
        if name == "rows":
            continue
        column = batch[name]
        if isinstance(column, Ragged):
            check_lengths(name, column.lengths, tokens.lengths)
            moved[name] = Ragged(np.insert(column.values, begins, 0), offsets)
        else:
            rows.append(name)
    return batch.only(*rows).assign(**moved)
