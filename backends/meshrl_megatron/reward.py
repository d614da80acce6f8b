"""The reward of the Megatron backend."""

from meshrl.roles import RewardModelConfig, options_of
from meshrl_hf.reward_head import ScoreModel
from meshrl_hf.roles import FrozenReward, Spread
from meshrl_hf.trainable import own_rank
from meshrl_megatron.model import build
from meshrl_megatron.options import MegatronConfig
from meshrl_megatron.passes import Pipeline


class MegatronReward(Spread, FrozenReward):
    """A sequence classifier with one label in the dtype of its table, split along its mesh's axes."""

    def __init__(self, config: RewardModelConfig) -> None:
        model = build(config, options_of(config, MegatronConfig), own_rank(), predicts="scores")
        passes = Pipeline(model.stages, model, valued=True).passes(config.micro_batch_tokens)
        super().__init__(ScoreModel(model.words, config), passes)
