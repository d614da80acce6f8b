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
    """A model split over its ranks, and trained by them together."""

    def __init__(self, config: PolicyConfig) -> None:
        if config.lora is not None:
            raise ConfigError("the backend 'megatron' has no adapters: use backend = \"fsdp\", or remove lora")
        super().__init__(config, Pipelined(config, "logprobs"))

    @staticmethod
    def check_rows(model: LanguageModel, batch: Batch) -> None:
        """Raise DataError if the model cannot read a batch's rows."""
        check_readable(model, batch)
        if COLUMN in batch:
            raise DataError(
                f"`{COLUMN}` has the experts that a sampler chose, which the backend 'megatron' cannot use: "
                'remove sampler.record_experts, or use backend = "fsdp"'
            )
