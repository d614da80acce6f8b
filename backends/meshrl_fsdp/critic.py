"""The critic of the FSDP2 backend."""

from meshrl.roles import CriticConfig
from meshrl_fsdp.loading import load_sharded_valued
from meshrl_fsdp.trainable import Sharding
from meshrl_hf.roles import Spread, TrainedCritic
from meshrl_hf.trainable import own_rank


class FsdpCritic(Spread, TrainedCritic):
    """A model with a value head, sharded over its ranks and trained by them together."""

    def __init__(self, config: CriticConfig) -> None:
        valued, sharded = load_sharded_valued(config, own_rank())
        super().__init__(Sharding(config, sharded, valued.predicted, valued.parameters, "critic", valued.head))
