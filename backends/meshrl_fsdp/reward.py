"""The reward of the FSDP2 backend: a frozen model that judges and is spread over the ranks."""

from functools import partial

import torch
from torch import Tensor

from meshrl.data import Batch
from meshrl.mesh import current_rank
from meshrl.roles import Reward, RewardModelConfig
from meshrl_fsdp.loading import load_sharded_judge
from meshrl_hf.packing import MicroBatch
from meshrl_hf.ranks import Spread
from meshrl_hf.scoring import one_by_one


class FsdpReward(Spread, Reward):
    """A model whose parameters are sharded; it computes in the dtype of its table, and its head in float32."""

    def __init__(self, config: RewardModelConfig) -> None:
        rank = current_rank()
        torch.set_num_threads(rank.threads)
        self._budget = config.micro_batch_tokens
        self._judge, self._sharded = load_sharded_judge(config, rank)
        self._world = self._sharded.world

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`; a completion that was cut short is judged as one that ends there."""
        return self._judge.score(one_by_one(self._predicted), batch, self._budget, self._world)

    def _predicted(self, batch: Batch, micro: MicroBatch) -> Tensor:
        return self._sharded(partial(self._judge.predicted, batch, micro))
