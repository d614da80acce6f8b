"""The policy of the torch backend."""

from functools import partial

from meshrl.roles import PolicyConfig
from meshrl_hf.loading import load
from meshrl_hf.lora import prepare, trained
from meshrl_hf.roles import TrainedPolicy
from meshrl_hf.scoring import predicted
from meshrl_torch.trainable import OneRank, check_alone


class TorchPolicy(TrainedPolicy):
    """A whole model, trained on one rank."""

    def __init__(self, config: PolicyConfig) -> None:
        check_alone("TorchPolicy", config.mesh)
        model = load(config)
        prepare(model, config)
        super().__init__(
            config, OneRank(config, model, partial(predicted, model, follows=True), trained(model), "policy")
        )
