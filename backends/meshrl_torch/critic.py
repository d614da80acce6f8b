"""The critic of the torch backend."""

from meshrl.roles import CriticConfig
from meshrl_hf.roles import TrainedCritic
from meshrl_hf.value_head import load_valued
from meshrl_torch.trainable import OneRank, check_alone


class TorchCritic(TrainedCritic):
    """A whole model with a value head, trained on one rank."""

    def __init__(self, config: CriticConfig) -> None:
        check_alone("TorchCritic", config.mesh)
        valued = load_valued(config)
        super().__init__(OneRank(config, valued.model, valued.predicted, valued.parameters, "critic", valued.head))
        self._valued = valued
