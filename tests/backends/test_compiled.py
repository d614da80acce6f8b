"""Compiled layers: compiled in the first steps, for any number of tokens, and not again; below recomputation too."""

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from meshrl import Batch, ClippedLoss, NewModel, PolicyConfig
from meshrl.roles import LoraConfig
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from tests.backends.material import rollouts

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Torch's compiler looks there itself."""
LAYERS = 9
"""More than torch compiles one function for."""
MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=LAYERS, heads=2, max_tokens=48)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts what is compiled, and compiles to the same operations: without a compiler of C++."""
    counted = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    torch._dynamo.reset()
    return counted


async def trained(policy: FsdpPolicy, batch: Batch) -> dict[str, float]:
    return dict((await policy.update(batch, ClippedLoss())).means())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": True},
        pytest.param({}, marks=pytest.mark.wide),
        pytest.param({"lora": LoraConfig()}, marks=pytest.mark.wide),
    ],
    ids=str,
)
async def test_nothing_is_compiled_after_the_second_step(
    counter: CompileCounterWithBackend, changes: dict[str, Any]
) -> None:
    table = {"model": MODEL, "backend": "fsdp", "micro_batch_tokens": 60, **changes}
    plain = FsdpPolicy(PolicyConfig.model_validate(table))
    policy = FsdpPolicy(PolicyConfig.model_validate({**table, "fsdp": {"compile": True}}))
    batches = [rollouts(seed=seed) for seed in range(4)]
    counts: list[int] = []
    for batch in batches:
        found, expected = await trained(policy, batch), await trained(plain, batch)
        assert found == pytest.approx(expected, rel=1e-4)
        await policy.logprobs(batch)
        counts.append(counter.frame_count)
    assert 0 < counts[1] < 2 * LAYERS  # the layers share what is compiled
    assert counts[1:] == [counts[1]] * 3
    lengths = {int(batch.tokens.lengths.sum()) for batch in batches}
    assert len(lengths) == 4
