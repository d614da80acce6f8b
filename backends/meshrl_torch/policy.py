"""The policy of the torch backend: packed training of a whole model on one rank."""

import asyncio

import numpy as np
import torch

from meshrl.actor import current_rank
from meshrl.data import Batch, Ragged
from meshrl.errors import ContractError, DataError
from meshrl.losses import Loss, token_weights
from meshrl.metrics import Metrics
from meshrl.roles import Policy, PolicyConfig
from meshrl.weights import Weights
from meshrl_torch import checkpoint
from meshrl_torch.loading import load
from meshrl_torch.optimizer import Optimizer
from meshrl_torch.packing import learned, micro_batches
from meshrl_torch.scoring import predicted, score, spread
from meshrl_torch.text import encode_completions, encode_prompts, texts_of
from meshrl_torch.transfer import export_weights


class TorchPolicy(Policy):
    """A model in float32 (or bfloat16, its optimizer too), trained by AdamW."""

    def __init__(self, config: PolicyConfig) -> None:
        rank = current_rank()
        if rank.size > 1:
            raise ContractError(
                f"TorchPolicy trains on one rank, and its mesh has {rank.size}: set run.meshes.{config.mesh}.ranks = 1"
            )
        torch.set_num_threads(rank.threads)
        self._config = config
        self._model = load(config)
        if config.activation_checkpointing:
            self._model.network.activation_checkpointing_enable({"use_reentrant": False})
            self._model.network.train(True)  # what transformers asks for; its dropout is zero
        self._optimizer = Optimizer(config.optimizer, list(self._model.network.parameters()))
        self._updating = asyncio.Lock()

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask` from `prompt` and `completion`."""
        tokenizer = self._model.tokenizer
        prompts = encode_prompts(tokenizer, texts_of(batch, "prompt"), self._model.chat)
        completions = encode_completions(tokenizer, texts_of(batch, "completion"))
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            self._model.check_lengths(len(prompt) + len(completion), f"row {row}")
        pairs = list(zip(prompts, completions, strict=True))
        return batch.assign(
            tokens=Ragged.of([prompt + completion for prompt, completion in pairs], np.int32),
            loss_mask=Ragged.of(
                [[False] * len(prompt) + [True] * len(completion) for prompt, completion in pairs], np.bool_
            ),
        )

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step, which may be cancelled between micro-batches and then changes no weight.

        DataError if there is nothing to learn, ModelError if the gradient is not finite.
        """
        async with self._updating:  # one at a time: gradients are gathered in the parameters
            return await self._update(batch, loss)

    async def _update(self, batch: Batch, loss: Loss) -> Metrics:
        tokens, mask = batch.tokens, batch.loss_mask
        rows, count = _learnable(tokens, mask)
        self._model.check_lengths(int(tokens.lengths.max()), "a row")
        weights = token_weights(mask, loss.normalise, tokens=count, rows=rows, constant=loss.constant)
        self._optimizer.forget()  # what an update left behind that failed half-way
        total = 0.0
        sums: dict[str, float] = {}
        for micro in micro_batches(tokens, learned(tokens, mask), mask, self._config.micro_batch_tokens):
            logprobs = predicted(self._model, batch, micro)
            columns = {name: spread(batch, name, micro.target) for name in loss.columns}
            judged = loss(logprobs, columns)
            value = judged.values @ torch.from_numpy(weights[micro.target])
            value.backward()
            total += value.item()
            for name, metric in judged.metrics.items():
                sums[name] = sums.get(name, 0.0) + float(metric.sum())
            await asyncio.sleep(0)  # here a cancelled call ends
        rate = self._optimizer.lr
        norm = self._optimizer.step()
        own = Metrics.of(
            loss=(total, 1),
            grad_norm=(norm, 1),
            lr=(rate, 1),
            rows=(len(batch), 1),
            tokens=(len(tokens.values), 1),
        )
        return own | Metrics({name: (value, count) for name, value in sums.items()})

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `logprobs`."""
        return batch.assign(logprobs=score(self._model, batch, self._config.micro_batch_tokens))

    async def weights(self) -> Weights:
        """A copy of the weights."""
        return export_weights(self._model, self._optimizer.steps)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder, whole or not at all."""
        checkpoint.write(self._model, folder)


def _learnable(tokens: Ragged, mask: Ragged) -> tuple[int, int]:
    """How many rows have a learned token, and how many such tokens there are."""
    starts = tokens.offsets[:-1][tokens.lengths > 0]
    values = np.asarray(mask.values, np.bool_)
    if values[starts].any():
        row = int(np.searchsorted(tokens.offsets, starts[values[starts]][0], side="right")) - 1
        raise DataError(
            f"`loss_mask` of row {row} is True at the first token, which nothing predicts: a row needs a token before "
            "the first that is learned"
        )
    count = int(values.sum())
    if count == 0:
        raise DataError(
            f"nothing to learn: `loss_mask` is False for all {len(values)} tokens of {len(mask)} rows; "
            "leave such a batch out"
        )
    return int(np.add.reduceat(values, starts).astype(bool).sum()), count
