"""The policy of the torch backend: packed training of a whole model on one rank."""

import asyncio

import torch
from torch import Tensor

from meshrl.actor import current_rank
from meshrl.data import Batch
from meshrl.delta import Sender
from meshrl.errors import ContractError
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.metrics import Metrics
from meshrl.ragged import Source
from meshrl.role_config import PolicyConfig
from meshrl.roles import Policy
from meshrl.weights import Weights
from meshrl_hf import checkpoint, training
from meshrl_hf.encoding import encoded
from meshrl_hf.loading import load
from meshrl_hf.lora import adapt, published, trained
from meshrl_hf.optimizer import Optimizer
from meshrl_hf.packing import MicroBatch
from meshrl_hf.probe import probe
from meshrl_hf.scoring import check_readable, logprobs, one_by_one, predicted
from meshrl_hf.state import TrainingState
from meshrl_hf.transfer import arrays
from meshrl_hf.writing import Writing


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
        adapt(self._model, config.lora, config.seed)
        if config.activation_checkpointing:
            self._model.network.activation_checkpointing_enable({"use_reentrant": False})
            self._model.network.train(True)  # what transformers asks for; its dropout is zero
        self._trained = trained(self._model)
        self._optimizer = Optimizer(config.optimizer, list(self._trained.values()))
        self._sender = Sender(changes=config.delta_sync)
        self._updating = asyncio.Lock()
        self._writing = Writing()

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask` from `prompt` and `completion`."""
        return encoded(self._model, batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step, which may be cancelled between micro-batches and then changes no weight.

        DataError if there is nothing to learn, the loss is a critic's, or log-probs come from elsewhere than it says or
        from later weights; ModelError if the gradient is not finite.
        """

        def check() -> None:
            check_predicts(loss, "logprobs")
            check_sources(batch, loss, self._optimizer.steps)
            check_readable(self._model, batch)

        async with self._updating:  # one at a time: gradients are gathered in the parameters
            budget = self._config.micro_batch_tokens
            return await training.step(self._optimizer, self._predicted, batch, loss, budget, check)

    def _predicted(self, batch: Batch, micro: MicroBatch) -> Tensor:
        return predicted(self._model, batch, micro)

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `logprobs`, of the version after the updates that were called before."""
        async with self._updating:
            source = Source.trainer(self._optimizer.steps)
            budget = self._config.micro_batch_tokens
            return batch.assign(logprobs=logprobs(self._model, one_by_one(self._predicted), batch, budget, source))

    async def weights(self) -> Weights:
        """A copy of the weights, after the updates that were called before; of adapted ones as `lora.sync` says."""
        async with self._updating:
            version = self._optimizer.steps
            asked = probe(self._model, one_by_one(self._predicted), version, self._config.micro_batch_tokens)
            tensors = published(self._model.tensors(), self._config.lora)
            return self._sender.weights(version, arrays(tensors.items()), asked)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder, or the adapters as peft does, whole or not at all."""
        if self._config.lora is None:
            checkpoint.write(self._model, folder)
        else:
            checkpoint.write_adapters(self._model, folder, self._model.tensors(), self._config)

    async def checkpoint(self, folder: str, wait: bool = True) -> None:
        """Write the weights, the optimizer's moments and the number of steps, after the updates that were called."""
        async with self._updating:
            self._writing.begin(self._state.copied(folder))
        if wait:
            await self._writing.written()

    async def written(self) -> None:
        """Wait until the last checkpoint is written."""
        await self._writing.written()

    async def restore(self, folder: str) -> None:
        """Take them; ModelError, and nothing taken, where they are of another role or model."""
        async with self._updating:
            self._state.read(folder)

    @property
    def _state(self) -> TrainingState:
        tensors = self._trained if self._config.lora else self._model.tensors()
        return TrainingState("policy", tensors, self._trained, self._optimizer)
