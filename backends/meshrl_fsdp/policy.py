"""The policy of the FSDP2 backend."""

from functools import partial

from meshrl.roles import PolicyConfig
from meshrl_fsdp.loading import load_sharded
from meshrl_fsdp.trainable import Sharding
from meshrl_hf.lora import trained
from meshrl_hf.roles import Spread, TrainedPolicy
from meshrl_hf.scoring import predicted
from meshrl_hf.trainable import own_rank


class FsdpPolicy(Spread, TrainedPolicy):
    """A model sharded over its ranks, and trained by them together."""

    def __init__(self, config: PolicyConfig) -> None:
        sharded = load_sharded(config, own_rank())
        predict = partial(predicted, sharded.model, follows=True)
        super().__init__(config, Sharding(config, sharded, predict, trained(sharded.model), "policy"))
