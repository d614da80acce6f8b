import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import meshrl as rl
from meshrl_torch.model.linear import use_onednn
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.test_memory import rollouts

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 512), (33, 512), (512,), (1, 0, 512)])
def test_a_linear_layer_computes_what_torchs_own_does_in_float64(
    shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    torch.manual_seed(0)
    plain, states = nn.Linear(512, 256, bias=bias), torch.randn(shape)
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    assert type(fast) is not nn.Linear

    def computed(layer: nn.Linear, dtype: torch.dtype) -> list[Tensor]:
        layer = copy.deepcopy(layer).to(dtype)
        given = states.detach().to(dtype, copy=True).requires_grad_()
        result = layer(given)
        result.pow(2).sum().backward()
        return [each for each in (result, given.grad, *(each.grad for each in layer.parameters())) if each is not None]

    for dtype in DTYPES:
        for found, expected in zip(computed(fast, dtype), computed(plain, torch.float64), strict=True):
            atol, rtol = (0.5, 0.05) if dtype == torch.bfloat16 else (1e-5, 1e-5)
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol)


def test_a_frozen_layer_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    layer = nn.Linear(512, 512).requires_grad_(False)
    use_onednn(layer)
    states = torch.ones(3, 512, requires_grad=True)
    layer(states).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(states.grad, layer.weight.sum(0).expand(3, 512))


def test_a_small_layer_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    layer = nn.Linear(128, 512)
    use_onednn(layer)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("lora", [None, rl.LoraConfig(rank=4)], ids=["whole", "adapters"])
async def test_a_model_of_large_layers_learns_what_it_learns_with_torchs_own(
    lora: rl.LoraConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rl.NewModel(hidden_size=512, ffn_size=256, layers=1, heads=4, characters="abcdefghij", max_tokens=80)
    optimizer = rl.OptimizerConfig(lr=0.01, eps=0.01)  # a gradient that is zero but for rounding moves nothing
    config = rl.PolicyConfig(model=model, lora=lora, optimizer=optimizer)
    found: list[dict[str, np.ndarray]] = []
    for capability in ("AVX512", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)  # noqa: B023 -- read at once
        policy = TorchPolicy(config)
        before = dict((await policy.weights()).tensors)
        await policy.update(rollouts(8), rl.ClippedLoss())
        logprobs = (await policy.logprobs(rollouts(8))).ragged("logprobs").values
        after = (await policy.weights()).tensors
        assert not all(np.allclose(after[name], before[name], atol=1e-4) for name in after)
        found.append({**after, "log-probs": logprobs})
    for name, values in found[0].items():
        np.testing.assert_allclose(values, found[1][name], atol=2e-5, err_msg=name)
