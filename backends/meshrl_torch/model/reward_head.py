"""A sequence classifier with one label: a language model's body, and a head that scores a text at its last token."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from meshrl import log
from meshrl.data import Batch, Ragged
from meshrl.errors import DataError, ModelError
from meshrl.roles import ModelConfig
from meshrl_torch.model.network import LanguageModel
from meshrl_torch.model.packing import MicroBatch, ends
from meshrl_torch.model.scoring import Passes, score
from meshrl_torch.model.text import encode_completions, encode_dialogues, encode_prompts, texts_of


class ScoreModel:
    """A model that scores texts, with the handling of rows that it cannot score."""

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
        self.model = model
        self.head = head
        self._pad: int | None = network.config.get_text_config().pad_token_id
        self._told = False

    def predicted(self, batch: Batch, micro: MicroBatch) -> Tensor:
        """Return the score of each text that ends in a micro-batch, float32[targets]."""
        there = micro.to(self.model.device)
        hidden = self.model.hidden(there.ids, there.positions, there.attend)[0].index_select(0, there.source)
        bias = cast("Tensor | None", self.head.bias)
        return linear(hidden.float(), self.head.weight.float(), None if bias is None else bias.float())[:, 0]

    def score(self, passes: Passes, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error` from the texts `prompt` and `completion`, with the model's tokenizer.

        With `chat`, they are two messages in its template. Without it, tokens are those of a policy's `encode`. A
        truncated completion is scored as if it ended there, because the model learned from whole texts. Scripts decide
        on the cost of truncation by the column `truncated`. A row gets reward 0 and a `reward_error` if the tokenizer
        cannot encode it, if it is too long for the model, or if its score is not finite.
        """
        read: list[tuple[Ragged, NDArray[np.int64], dict[int, str]]] = []
        passes.ranks.agree(lambda: read.append(self._read(batch)))
        tokens, shared, errors = read[0]
        values = score(passes, Batch.of(tokens=tokens), lambda: ends(tokens, shared), None)
        rewards = np.zeros(len(batch), np.float32)
        judged = np.flatnonzero(tokens.lengths)
        rewards[judged] = values[tokens.offsets[judged + 1] - 1]
        for row in np.flatnonzero(~np.isfinite(rewards)).tolist():
            errors[row] = f"the score is {rewards[row]}, and a reward must be finite"
            rewards[row] = 0
        self._tell(errors)
        return batch.assign(rewards=rewards, reward_error=[errors.get(row) for row in range(len(batch))])

    def encode(self, batch: Batch) -> Batch:
        """Add `tokens`, as `score` reads them, and `loss_mask`, True at the last. DataError for an unreadable row."""
        ids = [self.judged(each) for each in self._tokens(texts_of(batch, "prompt"), texts_of(batch, "completion"))]
        return self.marked(batch, ids, [[len(each) - 1] for each in ids])

    def marked(self, batch: Batch, rows: Sequence[Sequence[int]], scored: Sequence[Sequence[int]]) -> Batch:
        """Add these `tokens`, and `loss_mask`, True at the `scored` places of rows. DataError for an unreadable row."""
        for row, ids in enumerate(rows):
            if refused := self._refused(ids):
                raise DataError(f"row {row} cannot be judged: {refused}")
        tokens = Ragged.of(rows, np.int32)
        places = [start + at for start, own in zip(tokens.offsets[:-1].tolist(), scored, strict=True) for at in own]
        mask = np.zeros(len(tokens.values), np.bool_)
        mask[places] = True
        return batch.assign(tokens=tokens, loss_mask=Ragged(mask, tokens.offsets))

    def _read(self, batch: Batch) -> tuple[Ragged, NDArray[np.int64], dict[int, str]]:
        """Return each row's tokens plus one (none if it cannot be scored), numbers of shared tokens, and errors."""
        prompts, completions = texts_of(batch, "prompt"), texts_of(batch, "completion")
        rows: list[list[int]] = []
        errors: dict[int, str] = {}
        for row, (encoded, error) in enumerate(self._encoded(prompts, completions)):
            ids = self.judged(encoded)
            if refused := error or self._refused(ids):
                errors[row] = refused
            rows.append([] if refused else [*ids, 0])
        return Ragged.of(rows, np.int32), _shared(prompts, rows), errors

    def _encoded(
        self, prompts: Sequence[str], completions: Sequence[str]
    ) -> Sequence[tuple[Sequence[int], str | None]]:
        """Return the tokens of each row, or why it has none."""
        try:
            return [(ids, None) for ids in self._tokens(prompts, completions)]
        except DataError:
            found: list[tuple[Sequence[int], str | None]] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            try:
                found.append((self._tokens([prompt], [completion])[0], None))
            except DataError as error:
                found.append(([], str(error)))
        return found

    def _tokens(self, prompts: Sequence[str], completions: Sequence[str]) -> Sequence[list[int]]:
        tokenizer = self.model.tokenizer
        if self.model.chat is not None:
            return encode_dialogues(tokenizer, prompts, completions, self.model.chat)
        pairs = zip(
            encode_prompts(tokenizer, prompts, chat=None), encode_completions(tokenizer, completions), strict=True
        )
        return [prompt + completion for prompt, completion in pairs]

    def judged(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens up to the last that is not padding, where transformers' classifiers learn to score."""
        end = len(ids)
        while end and ids[end - 1] == self._pad:
            end -= 1
        return ids[:end]

    def _refused(self, ids: Sequence[int]) -> str | None:
        """Return why the model cannot read these tokens, or None."""
        if not ids:
            return "the row has no token"
        if max(ids) >= self.model.known:
            return f"the row has the token {max(ids)} and the model knows 0 to {self.model.known - 1}"
        try:
            self.model.check_lengths(len(ids), "the row")
        except DataError as error:
            return str(error)
        return None

    def _tell(self, errors: dict[int, str]) -> None:
        """Log the first rows that are not scored."""
        if errors and not self._told:
            self._told = True
            log.warning("a row cannot be judged; it gets reward 0", rows=len(errors), error=next(iter(errors.values())))


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
