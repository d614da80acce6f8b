"""The routers of a mixture of experts: a sampler records the experts of each token, and a policy uses the same.

Two programs may route a token to different experts if two are nearly equal, and so compute different log-probs. This is
rollout routing replay, arXiv:2510.11370.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshrl.data import Batch, Ragged, check_lengths
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl_torch.model.attention import moved
from meshrl_torch.model.packing import IDLE, MicroBatch

if TYPE_CHECKING:
    from meshrl_torch.model.network import LanguageModel

COLUMN: Final = "experts"
"""int16[tokens, layers, experts of a token]: the experts of each token in each layer that routes. -1: unknown."""
_REMEDY: Final = ", so its choice cannot be repeated: remove sampler.record_experts"


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


class _ForcedRoutes(TorchFunctionMode):
    """Makes a router's own code take given experts where it takes the highest ones, so that it weighs them itself."""

    def __init__(self, given: Tensor, experts: int) -> None:
        """`given`: int64[tokens, experts of a token]. At -1 the router chooses."""
        super().__init__()
        self._given, self._experts = given, experts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or result.indices.shape != self._given.shape:
            return result
        if args[0].shape != (len(self._given), self._experts):
            return result  # a choice of groups
        chosen = torch.where(self._given < 0, result.indices, self._given)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class TopKFinder(TorchFunctionMode):
    """Collects the modules that take the highest of some numbers for each token, other than one for each token."""

    def __init__(self, network: nn.Module, tokens: int) -> None:
        super().__init__()
        self._found: dict[nn.Module, None] = {}
        self._tokens, self._network = tokens, network
        self._inside: list[nn.Module] = []

    def unknown(self, routers: "Routers | None") -> nn.Module | None:
        """Return one that is in no router, or None."""
        return next((each for each in self._found if routers is None or not routers.has(each)), None)

    def __enter__(self) -> Self:
        modules = list(self._network.modules())
        self._hooks = [each.register_forward_pre_hook(lambda own, _: self._inside.append(own)) for each in modules]
        self._hooks += [each.register_forward_hook(lambda *_: self._leave()) for each in modules]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _leave(self) -> None:
        self._inside.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (torch.topk, Tensor.topk) and self._inside and args[0].shape[-1] not in (1, self._tokens):
            self._found[self._inside[-1]] = None
        return func(*args, **(kwargs or {}))


class Routers:
    """The routers of a network. In a pass with `routes` they record or follow experts."""

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        self._routers = routers
        self.routes: Routes | None = None
        """For the present pass and its backward pass, which may compute layers again."""
        route = cast("Callable[..., object]", torch.compiler.disable(self._route))
        for number, router in enumerate(routers):
            router.forward = partial(route, number, router.forward)

    @classmethod
    def of(cls, network: nn.Module) -> "Routers | None":
        """Return the routers of a network, or None if it has none: what counts experts next to a module of experts."""
        routers = [
            module
            for block in network.modules()
            if hasattr(block, "experts")
            for name, module in block.named_children()
            if name != "experts" and isinstance(getattr(module, "top_k", None), int)
        ]
        return cls(routers) if routers else None

    def has(self, module: nn.Module) -> bool:
        """True if a module is one of them, or inside one."""
        return any(module is each for router in self._routers for each in router.modules())

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers that route, and of experts for each token."""
        return len(self._routers), int(cast("int", self._routers[0].top_k))

    @property
    def experts(self) -> int:
        """Number of experts of a layer."""
        return next(len(each) for each in self._routers[0].parameters() if each.dim() > 1)

    def _route(self, number: int, forward: Callable[..., object], *args: object, **options: object) -> object:
        """Call a router's own `forward`. ModelError if it does not return the numbers of experts, or follow them."""
        if self.routes is None:
            return forward(*args, **options)
        given = None if self.routes.given is None else self.routes.given[:, number]
        with nullcontext() if given is None else _ForcedRoutes(given, self.experts):
            output = forward(*args, **options)
        parts = cast("tuple[object, ...]", output) if isinstance(output, tuple) else ()
        found = [each for each in parts if isinstance(each, Tensor) and each.dtype in (torch.int64, torch.int32)]
        if len(found) != 1 or found[0].shape[-1:] != self.shape[1:]:
            raise self._unknown(number, "returns no numbers of experts")
        if given is None:
            self.routes.seen.append(found[0].to(torch.int16))
        elif not torch.equal(torch.where(given < 0, found[0], given), found[0]):
            raise self._unknown(number, "does not take the highest of one score for each expert")
        return output

    def _unknown(self, number: int, why: str) -> ModelError:
        return ModelError(f"{type(self._routers[number]).__name__} {why}{_REMEDY}")


def routed(model: "LanguageModel") -> tuple[int, int]:
    """Return the number of layers that route, and of experts for each token, once these follow given experts.

    ConfigError if no layer routes. ModelError with the name of a router that cannot be followed.
    """
    routers, ids, routes = model.routers, torch.tensor([[0, 1]]), Routes()
    with torch.no_grad():
        with TopKFinder(model.network, ids.shape[1]) as choosing:
            model.hidden(ids, torch.arange(2)[None], IDLE.attend, routes)
        if unknown := choosing.unknown(routers):
            raise ModelError(f"{type(unknown).__name__} chooses in an unknown way{_REMEDY}")
        if routers is None:
            raise ConfigError("sampler.record_experts is set, but the model is not a mixture of experts: remove it")
        others = (torch.from_numpy(routes.recorded().astype(np.int64)) + 1) % routers.experts
        model.hidden(ids, torch.arange(2)[None], IDLE.attend, Routes(others))
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
