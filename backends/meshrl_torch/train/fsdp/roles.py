"""The roles of the backend `fsdp`: a model sharded over its ranks, which call each method together."""

from functools import partial

from meshrl.data import Weights
from meshrl.roles import CriticConfig, PolicyConfig, ReferenceConfig, RewardModelConfig, RewardTrainingConfig
from meshrl_torch.model.lora import trained
from meshrl_torch.model.scoring import predicted
from meshrl_torch.train.fsdp.loading import load_sharded, load_sharded_judge, load_sharded_valued, take
from meshrl_torch.train.fsdp.trainable import Sharding
from meshrl_torch.train.roles import (
    FrozenReference,
    FrozenReward,
    Spread,
    TrainedCritic,
    TrainedPolicy,
    TrainedRewardModel,
)
from meshrl_torch.train.trainable import own_rank


class FsdpPolicy(Spread, TrainedPolicy):
    """A model sharded over its ranks, and trained by them together."""

    def __init__(self, config: PolicyConfig) -> None:
        sharded = load_sharded(config, own_rank())
        predict = partial(predicted, sharded.model, follows=True)
        super().__init__(config, Sharding(config, sharded, predict, trained(sharded.model), "policy"))


class FsdpCritic(Spread, TrainedCritic):
    """A model with a value head, sharded over its ranks and trained by them together."""

    def __init__(self, config: CriticConfig) -> None:
        valued, sharded = load_sharded_valued(config, own_rank())
        super().__init__(Sharding(config, sharded, valued.predicted, valued.parameters, "critic", valued.head))


class FsdpRewardModel(Spread, TrainedRewardModel):
    """A model with a scoring head, sharded over its ranks and trained by them together."""

    def __init__(self, config: RewardTrainingConfig) -> None:
        judge, sharded = load_sharded_judge(config, own_rank())
        super().__init__(judge, Sharding(config, sharded, judge.predicted, sharded.parameters, "reward model"))


class FsdpReference(Spread, FrozenReference):
    """A sharded model, which computes in the dtype of its table."""

    def __init__(self, config: ReferenceConfig) -> None:
        self._sharded, self._dtype = load_sharded(config, own_rank()), config.dtype
        predict = partial(predicted, self._sharded.model)
        super().__init__(self._sharded.passes(predict, config.micro_batch_tokens))

    async def load(self, weights: Weights) -> None:
        """Copy this rank's shards of the weights in place."""
        take(self._sharded, weights, self._dtype)


class FsdpReward(Spread, FrozenReward):
    """A sharded model, which computes in the dtype of its table, and in float32 in its head."""

    def __init__(self, config: RewardModelConfig) -> None:
        judge, sharded = load_sharded_judge(config, own_rank())
        super().__init__(judge, sharded.passes(judge.predicted, config.micro_batch_tokens))
