"""The policy of the Megatron backend."""

from meshrl.data import Batch
from meshrl.errors import ConfigError, DataError
from meshrl.roles import PolicyConfig
from meshrl_hf.model import LanguageModel
from meshrl_hf.roles import Spread, TrainedPolicy
from meshrl_hf.routing import COLUMN
from meshrl_hf.scoring import check_readable
from meshrl_megatron.trainable import Pipelined


class MegatronPolicy(Spread, TrainedPolicy):
    """A model that its ranks hold in parts, and train together."""

    def __init__(self, config: PolicyConfig) -> None:
        if config.lora is not None:
            raise ConfigError("the backend 'megatron' has no adapters: take backend = \"fsdp\", or leave lora out")
        super().__init__(config, Pipelined(config, "logprobs"))

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """DataError where the model cannot read a batch's rows."""
        check_readable(model, batch)
        if COLUMN in batch:
            raise DataError(
                f"`{COLUMN}` tells the experts that a sampler chose, which the backend 'megatron' does not follow: "
                'leave sampler.record_experts out, or take backend = "fsdp"'
            )
