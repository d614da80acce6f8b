"""The policy of the Megatron backend."""

from meshrl.errors import ConfigError
from meshrl.roles import PolicyConfig
from meshrl_hf.roles import Spread, TrainedPolicy
from meshrl_megatron.trainable import Pipelined


class MegatronPolicy(Spread, TrainedPolicy):
    """A model that its ranks hold in parts, and train together."""

    def __init__(self, config: PolicyConfig) -> None:
        if config.lora is not None:
            raise ConfigError("the backend 'megatron' has no adapters: take backend = \"fsdp\", or leave lora out")
        super().__init__(config, Pipelined(config, "logprobs"))
