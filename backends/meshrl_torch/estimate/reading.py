"""How a role's model will read rows, from its config.json alone."""

from meshrl import log
from meshrl.roles import ModelConfig
from meshrl_torch.model.heads import kind_of
from meshrl_torch.model.loading import config_of, packing_of, quiet, vision_of, without_values
from meshrl_torch.model.network import ready, with_layout
from meshrl_torch.model.text import character_tokenizer


def reads(config: ModelConfig) -> str:
    """Return "packed", or "padded" with the reason. ModelError if the model cannot be read, or not as the table says.

    The architecture is made without values, and a stand-in of it is asked.
    """
    with quiet(), log.silenced():
        network, words = without_values(config_of(config), kind_of(config)), character_tokenizer("a", 8)
        model = ready(network, words, None, vision=vision_of(config, network.config, words))
        layout = with_layout(model, packing_of(config)).layout
    return f"{layout.name}: {layout.why}" if layout.why else layout.name
