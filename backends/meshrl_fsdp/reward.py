"""The reward of the FSDP2 backend."""

from meshrl.roles import RewardModelConfig
from meshrl_fsdp.loading import load_sharded_judge
from meshrl_hf.roles import FrozenReward, Spread
from meshrl_hf.trainable import own_rank


class FsdpReward(Spread, FrozenReward):
    """A sharded model, which computes in the dtype of its table, and in float32 in its head."""

    def __init__(self, config: RewardModelConfig) -> None:
        judge, sharded = load_sharded_judge(config, own_rank())
        super().__init__(judge, sharded.passes(judge.predicted, config.micro_batch_tokens))
