"""The policy of the FSDP2 backend: packed training of a model that is spread over the ranks."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from meshrl.data import Batch, Metrics, Source
from meshrl.losses import Loss, check_predicts, check_sources
from meshrl.mesh import current_rank
from meshrl.roles import Policy, PolicyConfig
from meshrl.weights import Weights, WeightSource
from meshrl_fsdp.loading import load_sharded_policy
from meshrl_fsdp.optimizer import ShardedOptimizer
from meshrl_fsdp.state import ShardedState
from meshrl_hf import checkpoint, training
from meshrl_hf.encoding import encoded
from meshrl_hf.lora import published, trained
from meshrl_hf.packing import MicroBatch
from meshrl_hf.probe import probe
from meshrl_hf.scoring import check_readable, logprobs, one_by_one, predicted
from meshrl_hf.spread_training import SpreadTraining
from meshrl_hf.transfer import arrays


class FsdpPolicy(SpreadTraining, Policy):
    """A model whose parameters and optimizer, float32, are sharded; it computes in the dtype of its table.

    A call runs on all ranks at the same time, from its beginning to its end.
    """

    def __init__(self, config: PolicyConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        self._config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._sharded = load_sharded_policy(config, rank)
        self._model, self._world = self._sharded.model, self._sharded.world
        self._optimizer = ShardedOptimizer(config.optimizer, self._sharded, list(trained(self._model).values()))
        self._sender = WeightSource(changes=config.delta_sync)
        self._state = ShardedState("policy", self._sharded, trained(self._model), self._optimizer)

    async def encode(self, batch: Batch) -> Batch:
        """Add `tokens` and `loss_mask` from `prompt` and `completion`."""
        return encoded(self._model, batch)

    async def update(self, batch: Batch, loss: Loss) -> Metrics:
        """One optimizer step on the rows of all ranks.

        DataError, on all ranks, if there is nothing to learn, the loss is a critic's, or log-probs come from elsewhere
        than it says or from later weights; ModelError if the gradient is not finite. Then no weight has changed.
        """

        def check() -> None:
            check_predicts(loss, "logprobs")
            check_sources(batch, loss, self._optimizer.steps)
            check_readable(self._model, batch)

        budget = self._config.micro_batch_tokens
        return await training.step(self._optimizer, self._predicted, batch, loss, budget, check, self._world)

    async def logprobs(self, batch: Batch) -> Batch:
        """Add `logprobs`, of the version after the updates that were called before."""
        source, budget = Source.trainer(self._optimizer.steps), self._config.micro_batch_tokens
        predict = one_by_one(self._predicted)
        return batch.assign(logprobs=logprobs(self._model, predict, batch, budget, source, self._world))

    async def weights(self) -> Weights:
        """This rank's part of the weights, whole tensors in the table's dtype; adapted ones as `lora.sync` says."""
        version = self._optimizer.steps
        predict, budget = one_by_one(self._predicted), self._config.micro_batch_tokens
        asked = probe(self._model, predict, version, budget, self._world)
        return self._sender.weights(version, arrays(self._share()), asked)

    def _share(self) -> Iterator[tuple[str, Tensor]]:
        """Every rank at the same time; each keeps about as many bytes as the others."""
        lora = self._config.lora
        tensors = self._sharded.tensors() if lora is None else published(self._sharded.whole(), lora).items()
        loads = [0] * dist.get_world_size()
        for name, tensor in tensors:
            lightest = loads.index(min(loads))
            loads[lightest] += tensor.numel()
            if lightest == self._world.number:
                yield name, tensor.to(self._dtype)

    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder in the dtype of the table, or the adapters as peft does, whole or not at all."""
        tensors = self._cast(self._sharded.whole())

        def write() -> None:
            if self._config.lora is None:
                checkpoint.write(self._model, folder, tensors=tensors)
            else:
                checkpoint.write_adapters(self._model, folder, tensors, self._config)

        self._world.first(write)

    def _cast(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self._dtype) for name, tensor in tensors.items()}

    def _predicted(self, batch: Batch, micro: MicroBatch) -> Tensor:
        return self._sharded(partial(predicted, self._model, batch, micro))
