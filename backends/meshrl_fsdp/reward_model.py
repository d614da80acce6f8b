"""The reward model of the FSDP2 backend."""

from meshrl.roles import RewardTrainingConfig
from meshrl_fsdp.loading import load_sharded_judge
from meshrl_fsdp.trainable import Sharding
from meshrl_hf.roles import Spread, TrainedRewardModel
from meshrl_hf.trainable import own_rank


class FsdpRewardModel(Spread, TrainedRewardModel):
    """A model with a scoring head, sharded over its ranks and trained by them together."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        judge, sharded = load_sharded_judge(config, own_rank())
        super().__init__(judge, Sharding(config, sharded, judge.predicted, sharded.parameters, "reward model"))
