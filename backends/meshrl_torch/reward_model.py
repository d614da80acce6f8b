"""The reward model of the torch backend."""

from meshrl.roles import RewardTrainingConfig
from meshrl_hf.lora import trained
from meshrl_hf.reward_training import load_judge
from meshrl_hf.roles import TrainedRewardModel
from meshrl_torch.trainable import OneRank, check_alone


class TorchRewardModel(TrainedRewardModel):
    """A whole model with a scoring head, trained on one rank."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        check_alone("TorchRewardModel", config.mesh)
        judge = load_judge(config)
        trainable = OneRank(config, judge.model, judge.predicted, trained(judge.model), "reward model")
        super().__init__(judge, trainable)
