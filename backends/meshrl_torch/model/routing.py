"""The routers of a mixture of experts: a sampler records the experts of each token, and a policy uses the same.

Two programs may route a token to different experts if two are nearly equal, and so compute different log-probs. This is
rollout routing replay, arXiv:2510.11370.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from meshrl.data import Batch, Ragged, check_lengths
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl_torch.model.attention import moved
from meshrl_torch.model.packing import IDLE, MicroBatch

COLUMN: Final = "experts"
"""int16[tokens, layers, experts of a token]: the experts of each token in each layer that routes. -1: unknown."""
_KIND: Final = "TopKRouter"
"""Suffix of the names of transformers' router classes."""


@dataclass(frozen=True)
class Routes:
    """The experts of a forward pass, recorded or given."""

    given: Tensor | None = None
    """int64[tokens, layers, experts of a token]. At -1 the model chooses. None: experts are recorded."""
    seen: list[Tensor] = field(default_factory=list)
    """The recorded experts, int16[tokens, experts of a token] for each layer."""

    def recorded(self) -> np.ndarray[Any, np.dtype[np.int16]]:
        """Return the recorded experts, int16[tokens, layers, experts of a token]."""
        return torch.stack(self.seen, 1).cpu().numpy()


class Routers:
    """The routers of a network. In a pass with `routes` they record or follow experts."""

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self._routers = routers
        self._known = [False] * len(routers)
        """For each router, True once `_weights` was found to equal its own results."""
        self.routes: Routes | None = None
        """For the present pass and its backward pass, which may compute layers again."""
        route = cast("Callable[..., object]", torch.compiler.disable(self._route))
        for number, router in enumerate(routers):
            router.register_forward_hook(partial(route, number))

    @classmethod
    def of(cls, network: nn.Module) -> "Routers | None":
        """Return the routers of a network, or None if it has none."""
        routers = [module for module in network.modules() if type(module).__name__.endswith(_KIND)]
        return cls(routers) if routers else None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers that route, and of experts for each token."""
        return len(self._routers), int(cast("int", self._routers[0].top_k))

    @property
    def experts(self) -> int:
        """Number of experts of a layer."""
        return int(cast("int", self._routers[0].num_experts))

    def _route(self, number: int, router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> object:
        """Replace a router's `output`: logits, and weights and numbers of each token's experts."""
        if self.routes is None:
            return None
        logits, weights, chosen = output
        if not self._known[number]:
            with torch.no_grad():
                own = _weights(router, logits, chosen)
            if own.shape != weights.shape or not torch.allclose(own.float(), weights.float(), rtol=1e-2, atol=1e-3):
                raise ModelError(
                    f"{type(router).__name__} weighs experts in its own way, so its choice cannot be repeated: remove "
                    "sampler.record_experts"
                )
            self._known[number] = True
        if self.routes.given is None:
            self.routes.seen.append(chosen.to(torch.int16))
            return None
        given = self.routes.given[:, number]
        followed = torch.where(given < 0, chosen, given)
        return logits, _weights(router, logits, followed).to(weights.dtype), followed


def _weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Compute the weights of these experts, float32[tokens, experts of a token], as in Mixtral and later models."""
    weights = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def routed(routers: Routers | None) -> tuple[int, int]:
    """Return the number of layers that route, and of experts for each token. ConfigError if no layer routes."""
    if routers is None:
        raise ConfigError(
            "sampler.record_experts is set, but the model is not a mixture of experts, or has unknown routers: remove "
            "it"
        )
    return routers.shape


def check_followed(routers: Routers | None, batch: Batch) -> None:
    """Raise DataError if a batch has experts that the model lacks."""
    if COLUMN not in batch:
        return
    column = batch[COLUMN]
    shape, experts = (routers.shape, routers.experts) if routers else ((0, 0), 0)
    if not isinstance(column, Ragged) or column.values.shape[1:] != shape:
        of = column.values.shape if isinstance(column, Ragged) else "no token column"
        raise DataError(
            f"`{COLUMN}` is {list(of)} and the policy routes in {shape[0]} layers to {shape[1]} experts: the rows are "
            f'of a sampler of another model; leave the column out with batch.drop("{COLUMN}")'
        )
    check_lengths(COLUMN, column.lengths, batch.tokens.lengths)
    if (most := int(column.values.max(initial=-1))) >= experts:
        raise DataError(f"`{COLUMN}` names the expert {most}, and the policy has those from 0 to {experts - 1}")


def followed(batch: Batch, micro: MicroBatch, device: torch.device) -> Routes | None:
    """Return the experts in a batch for a micro-batch's tokens. None if it has no experts."""
    if COLUMN not in batch or micro is IDLE:
        return None
    experts = cast("Ragged", batch[COLUMN]).values[micro.read]
    return Routes(moved(torch.from_numpy(experts.astype(np.int64)), device))
