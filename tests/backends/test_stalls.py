"""A step asks a device for numbers as often for many micro-batches as for one: between them the host goes on."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl import ClippedLoss, PolicyConfig
from meshrl.losses import TokenLoss
from meshrl.roles import Policy
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_megatron.policy import MegatronPolicy
from meshrl_torch.policy import TorchPolicy
from tests.backends.material import MODEL, Counted, rollouts

BACKENDS: Mapping[str, Callable[[PolicyConfig], Policy]] = {
    "torch": TorchPolicy,
    "fsdp": FsdpPolicy,
    "megatron": MegatronPolicy,
}
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"}
"""What makes the host wait until a device has computed."""


class Watch(TorchDispatchMode):
    """Counts what the host waits for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types it not
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.reads[name] += name in READS
        return func(*args, **(kwargs or {}))


class Curious(Counted):
    """Looks at a number of each micro-batch."""

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        assert logprobs.sum().item() < 0
        return super().__call__(logprobs, columns)


async def reads(backend: str, budget: int, loss: Counted) -> tuple[int, int]:
    """How many micro-batches the second step makes, and what the host waits for in it."""
    table = {"model": MODEL, "backend": backend, "micro_batch_tokens": budget}
    trainer = BACKENDS[backend](PolicyConfig.model_validate(table))
    await trainer.update(rollouts(), ClippedLoss())
    with Watch() as watch:
        await trainer.update(rollouts(seed=1), loss)
    return len(loss._calls), watch.reads.total()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_step_waits_as_often_for_many_micro_batches_as_for_one(backend: str) -> None:
    once, often = await reads(backend, 4096, Counted()), await reads(backend, 20, Counted())
    curious = await reads(backend, 20, Curious())
    assert once[0] == 1
    assert often[0] > 3
    assert often[1] == once[1]
    assert curious[1] == often[1] + curious[0], "a look that was planted is found"
