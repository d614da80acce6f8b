"""A model in training, spread over the ranks."""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrl.algo import Loss
from meshrl.data import Batch, Metrics
from meshrl.roles import CriticConfig, PolicyConfig, RewardTrainingConfig, options_of
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model import saving as checkpoint
from meshrl_torch.model.lora import published
from meshrl_torch.model.scoring import Predict
from meshrl_torch.options import FsdpConfig
from meshrl_torch.train import step as training
from meshrl_torch.train.fsdp.optimizer import ShardedOptimizer
from meshrl_torch.train.fsdp.parts import is_first, local, rectangle
from meshrl_torch.train.fsdp.sharded import Sharded, gathered
from meshrl_torch.train.fsdp.state import ShardedState
from meshrl_torch.train.trainable import Trainable


class Sharding(Trainable):
    """A model with sharded float32 parameters and optimizer. It computes in the dtype of its table."""

    def __init__(
        self,
        config: PolicyConfig | CriticConfig | RewardTrainingConfig,
        sharded: Sharded,
        predict: Predict,
        parameters: Mapping[str, nn.Parameter],
        role: str,
        head: nn.Linear | None = None,
    ) -> None:
        """`parameters`: the trained ones. `head`: a critic's, which is not part of the model."""
        self._adapted = config if isinstance(config, PolicyConfig) and config.lora else None
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._sharded, self._head = sharded, head
        self._predict = sharded.predicting(predict)
        offload = options_of(config, FsdpConfig).offload_moments
        optimizer = ShardedOptimizer(config.optimizer, sharded, list(parameters.values()), offload=offload)
        passes = sharded.passes(predict, config.micro_batch_tokens)
        super().__init__(passes, optimizer, ShardedState(role, sharded, parameters, optimizer))

    async def step(self, batch: Batch, loss: Loss, check: Callable[[], object]) -> Metrics:
        """Make one optimizer step on the rows of all ranks."""
        begin = self._sharded.begin
        return await training.step(self.optimizer, self.passes, self._predict, batch, loss, check, begin)

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's share, in the table's dtype, with about as many bytes as the others'."""
        sharded, adapted = self._sharded, self._adapted
        tensors = published(sharded.whole(), adapted.lora).items() if adapted else sharded.tensors()
        loads = [0] * dist.get_world_size()
        for name, tensor in tensors:
            lightest = loads.index(min(loads))
            loads[lightest] += tensor.numel()
            if lightest == sharded.world.number:
                yield name, tensor.to(self._dtype)

    def shards(self) -> Iterator[Box]:
        """Yield this rank's shards, in float32. Of ranks with the same shard, the first has it."""
        self._sharded.reshard()
        for name, tensor in self._sharded.saved.items():
            if is_first(tensor):
                yield from rectangle(name, tensor, local(tensor))

    def save(self, folder: str) -> None:
        """Write a Hugging Face folder in the dtype of the table, or the adapters like peft, on the first rank."""
        model, world = self.passes.model, self._sharded.world
        tensors = {name: tensor.to(self._dtype) for name, tensor in self._sharded.whole().items()}
        head = {name: gathered(each).cpu() for name, each in self._head.named_parameters()} if self._head else None

        def write() -> None:
            if self._adapted:
                checkpoint.write_adapters(model, folder, tensors, self._adapted)
            else:
                checkpoint.write(model, folder, head, tensors)

        world.first(write)
