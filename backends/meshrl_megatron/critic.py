"""The critic of the Megatron backend."""

from meshrl.roles import CriticConfig
from meshrl_hf.roles import Spread, TrainedCritic
from meshrl_megatron.trainable import Pipelined


class MegatronCritic(Spread, TrainedCritic):
    """A model with a value head, split over its ranks and trained by them together."""

    def __init__(self, config: CriticConfig) -> None:
        super().__init__(Pipelined(config, "values"))
