"""The reward of the torch backend: a frozen model that judges."""

import torch

from meshrl.data import Batch
from meshrl.mesh import current_rank
from meshrl.roles import Reward, RewardModelConfig
from meshrl_hf.reward_head import load_reward_model
from meshrl_hf.scoring import one_by_one


class TorchReward(Reward):
    """A whole model on each rank."""

    def __init__(self, config: RewardModelConfig) -> None:
        torch.set_num_threads(current_rank().threads)
        self._budget = config.micro_batch_tokens
        self._judge = load_reward_model(config)

    async def score(self, batch: Batch) -> Batch:
        """Add `rewards` and `reward_error`; a completion that was cut short is judged as one that ends there."""
        return self._judge.score(one_by_one(self._judge.predicted), batch, self._budget)
