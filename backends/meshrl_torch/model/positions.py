"""Rotary embeddings that depend on a row's length, as LongRoPE does: each row of a pass gets those of the row alone."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

ANY: Final = 1 << 62
"""The native length of a model whose positions do not depend on a row's length."""

_Embed: TypeAlias = Callable[..., tuple[Tensor, ...]]


def native_tokens(config: PretrainedConfig) -> int:
    """Return the longest row with a model's native positions. Longer ones have others, from their first token on."""
    shape = config.get_text_config()
    table = cast("Mapping[str, object]", getattr(shape, "rope_parameters", None) or {})
    tables = [table, *(each for each in table.values() if isinstance(each, Mapping))]  # one for each kind of layer
    lengths = (each.get("original_max_position_embeddings") for each in tables if _differs(each))
    return min((each for each in lengths if isinstance(each, int)), default=ANY)


def _differs(table: Mapping[str, object]) -> bool:
    """True if a table of LongRoPE has other numbers for long rows."""
    pairs = [(table.get(f"short_{name}"), table.get(f"long_{name}")) for name in ("factor", "mscale")]
    return table.get("rope_type") == "longrope" and any(short != long for short, long in pairs)


class Rotaries:
    """The rotary embeddings of a network, which compute each token's states as in its row alone.

    transformers chooses native or long positions once for all tokens of a pass, by the highest position.
    """

    def __init__(self, network: nn.Module, native: int) -> None:
        self._native = native
        self.beyond: Tensor | None = None
        """The tokens of rows longer than `native`, bool[batch, tokens], in the present pass. None: no row is."""
        for module in network.modules():
            if hasattr(module, "rope_type"):
                module.forward = partial(self._embed, cast("_Embed", module.forward))

    def _embed(
        self, embed: _Embed, states: Tensor, position_ids: Tensor, *args: object, **options: object
    ) -> tuple[Tensor, ...]:
        """Return what is multiplied with queries and keys, [batch, tokens, dims] each."""
        if self.beyond is None:
            return embed(states, position_ids, *args, **options)
        beyond, higher = self.beyond[..., None], position_ids.new_full((len(position_ids), 1), self._native)
        native = embed(states, position_ids.clamp(max=self._native - 1), *args, **options)
        long = embed(states, torch.cat([position_ids, higher], 1), *args, **options)
        both: Iterable[tuple[Tensor, Tensor]] = zip(native, long, strict=True)
        return tuple(torch.where(beyond, other[:, :-1], own) for own, other in both)
