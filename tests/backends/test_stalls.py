"""A step asks a device for numbers as often for many micro-batches as for one: between them the host goes on."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import PrivateAttr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from meshrl import ClippedLoss, NewModel, PolicyConfig
from meshrl.losses import TokenLoss
from meshrl.roles import Policy
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_hf import devices
from meshrl_hf.model import ready
from meshrl_hf.scoring import Passes, one_by_one, predicted
from meshrl_hf.text import character_tokenizer
from meshrl_hf.training import prepared
from meshrl_megatron.policy import MegatronPolicy
from meshrl_torch.policy import TorchPolicy
from tests.backends.test_torch_updates import rollouts

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
BACKENDS: Mapping[str, Callable[[PolicyConfig], Policy]] = {
    "torch": TorchPolicy,
    "fsdp": FsdpPolicy,
    "megatron": MegatronPolicy,
}
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"}
"""What makes the host wait until a device has computed."""


class Watch(TorchDispatchMode):
    """Counts what the host waits for, and refuses copies to another device that it would wait for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types it not
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = func._schema.name.removeprefix("aten::"), kwargs or {}
        self.reads[name] += name in READS
        if name == "_to_copy" and given.get("device") not in (None, args[0].device):
            assert given.get("non_blocking"), "the host waits for a copy"
        return func(*args, **given)


async def reads(backend: str, budget: int) -> tuple[int, int]:
    """How many micro-batches the second step makes, and what the host waits for in it."""
    trainer = BACKENDS[backend](
        PolicyConfig.model_validate({"model": MODEL, "backend": backend, "micro_batch_tokens": budget})
    )
    loss = Counted()
    await trainer.update(rollouts(), ClippedLoss())
    with Watch() as watch:
        await trainer.update(rollouts(seed=1), loss)
    return len(loss._calls), watch.reads.total()


class Counted(ClippedLoss):
    """Of how many micro-batches it was asked."""

    _calls: list[int] = PrivateAttr(default_factory=list)

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        self._calls.append(len(logprobs))
        return super().__call__(logprobs, columns)


class Curious(Counted):
    """Looks at a number of each micro-batch."""

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        assert logprobs.sum().item() < 0
        return super().__call__(logprobs, columns)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_step_waits_as_often_for_many_micro_batches_as_for_one(backend: str) -> None:
    once, often = await reads(backend, 4096), await reads(backend, 20)
    assert once[0] == 1
    assert often[0] > 5
    assert often[1] == once[1]


class OnDevice(Tensor):
    """A tensor that was moved to a device, or was computed from such, as every function of torch that takes it says."""

    reads: ClassVar[Counter[str]] = Counter()
    """How often the host has looked into one, by method."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in LOOKS:
            cls.reads[func.__name__] += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


LOOKS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.nonzero, Tensor.__bool__, Tensor.__int__,
    Tensor.__float__, Tensor.__index__,
}  # fmt: skip


async def looks(monkeypatch: pytest.MonkeyPatch, backend: str, budget: int, loss: Counted) -> Counter[str]:
    """How often the second step of a policy looks into what is on the device, its parameters aside."""
    moved = devices.moved
    for module in [each for each in sys.modules.values() if getattr(each, "moved", None) is moved]:
        monkeypatch.setattr(module, "moved", lambda tensor, device: moved(tensor, device).as_subclass(OnDevice))
    table = {"model": MODEL, "backend": backend, "micro_batch_tokens": budget}
    trainer = BACKENDS[backend](PolicyConfig.model_validate(table))
    await trainer.update(rollouts(), ClippedLoss())
    OnDevice.reads.clear()
    await trainer.update(rollouts(seed=1), loss)
    return Counter(OnDevice.reads)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of the stand-in: its views are no views
@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_host_looks_at_the_device_once_a_step_when_all_is_computed(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    loss = Counted()
    assert await looks(monkeypatch, backend, 20, loss) == {"tolist": 1}
    assert len({*loss._calls}) > 1  # micro-batches of different lengths


async def test_a_planted_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Curious()
    found = await looks(monkeypatch, "torch", 20, loss)
    assert found == {"tolist": 1, "item": len(loss._calls)}


def test_no_number_of_a_micro_batch_is_read_and_no_copy_waited_for() -> None:
    """On a device without numbers, reading one raises."""
    with torch.device("meta"):
        network = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                eos_token_id=1,
            )
        )  # fmt: skip
    model = ready(network, character_tokenizer("abcdefgh>", 48), chat=None)
    batch = rollouts()
    batch = batch.assign(temperature=np.full(len(batch), 0.7, np.float32))
    passes = Passes(model, one_by_one(lambda given, micro: predicted(model, given, micro)), 40)
    step = prepared(passes, batch, ClippedLoss(), lambda: None)
    with Watch() as watch:
        for micro in step.micros:
            step.judge(predicted(model, batch, micro), micro, passes.ranks).backward()
    assert not watch.reads.total()
    assert all(each.grad is not None for each in network.parameters())
    with pytest.raises(NotImplementedError, match="meta"):
        step.judge.told()
