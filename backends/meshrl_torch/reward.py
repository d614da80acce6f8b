"""The reward of the torch backend."""

from meshrl.roles import RewardModelConfig
from meshrl_hf.reward_training import load_judge
from meshrl_hf.roles import FrozenReward
from meshrl_hf.scoring import Passes, one_by_one
from meshrl_hf.trainable import own_rank


class TorchReward(FrozenReward):
    """A whole model on each rank."""

    def __init__(self, config: RewardModelConfig) -> None:
        own_rank()
        judge = load_judge(config)
        super().__init__(judge, Passes(judge.model, one_by_one(judge.predicted), config.micro_batch_tokens))
