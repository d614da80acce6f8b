"""The reward model of the Megatron backend."""

from meshrl.roles import RewardTrainingConfig
from meshrl_hf.reward_head import ScoreModel
from meshrl_hf.roles import Spread, TrainedRewardModel
from meshrl_megatron.trainable import Pipelined


class MegatronRewardModel(Spread, TrainedRewardModel):
    """A model with a scoring head, split over its ranks and trained by them together."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        trainable = Pipelined(config, "scores")
        super().__init__(ScoreModel(trainable.passes.model, config), trainable)
