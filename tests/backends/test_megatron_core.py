"""Megatron-Core without a GPU: what is rewritten, what is refused, and a stand-in for Transformer Engine in its layers.

The stand-in has the signatures of the real classes and computes on the CPU. Its numbers say that parameters, gradients
and weights are in the right places. They say nothing of the real kernels.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from meshrl import PolicyConfig
from meshrl.errors import BackendError, ConfigError
from meshrl_megatron import cpu
from meshrl_megatron.roles import MegatronPolicy
from tests.backends.material import MODEL, SHAPE, ModelOf


def test_what_is_rewritten_keeps_its_line_and_a_use_of_cuda_that_is_unknown_is_refused() -> None:
    made = cpu.rewritten(ast.parse("import torch\n\ntorch.cuda.synchronize(\n)\n1 / 0"), "megatron.core.part")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile(made, "part.py", "exec"), {})  # noqa: S102
    assert raised.traceback[-1].lineno == 4  # counted from 0
    cases = "torch.cuda.made_up", "x.cuda", "'torch.cuda.ByteTensor'", "torch.cuda", "from torch.cuda import a"
    for unknown in cases:
        line = unknown if "import" in unknown else f"value = {unknown}"
        with pytest.raises(BackendError) as refused:
            cpu.rewritten(ast.parse(f"import torch\n\nclass Part:\n    {line}"), "megatron.core.part")
        assert f"megatron.core.part, line 4: `{unknown}` has no CPU form" in str(refused.value)


def test_with_a_gpu_nothing_is_rewritten_and_plain_imports_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", finders := list[object]())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu.install()
    assert not finders
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(BackendError, match=r"megatron\.core was imported before meshrl_megatron\.core"):
        cpu.install()


ROOT = Path(__file__).parents[2]
ENGINE = {"megatron": {"transformer_impl": "transformer_engine"}}
SIZES: Mapping[str, Any] = {**SHAPE, "initializer_range": 0.15}
BIASED = Qwen2Config(**SIZES, tie_word_embeddings=True)
EXPERTS = Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True)
MODULES = {"RMSNorm", "TEColumnParallelLinear", "TERowParallelLinear"}

SCRIPT = """
import asyncio, json, sys, warnings
import numpy as np
import meshrl_torch.model.lora  # peft looks for Transformer Engine too
from tests.backends.engine_standin import install, used
install()
from meshrl import ClippedLoss, PolicyConfig
from meshrl_megatron.roles import MegatronPolicy
from tests.backends.material import SGD, rollouts

warnings.simplefilter("error")

def made(folder, **keys):
    table = {"model": folder, "backend": "megatron", "optimizer": SGD, **keys}
    return MegatronPolicy(PolicyConfig.model_validate(table))

async def compared(folder):
    policies = [made(folder), made(folder, megatron={"transformer_impl": "transformer_engine"})]
    apart = {"logprobs": [], "grad_norm": []}
    for seed in range(3):
        batch = rollouts(seed=seed)
        own, other = [(await each.logprobs(batch)).ragged("logprobs").values for each in policies]
        apart["logprobs"].append(float(np.abs(own - other).max()))
        own, other = [(await each.update(batch, ClippedLoss()))["grad_norm"] for each in policies]
        apart["grad_norm"].append(abs(own - other))
    # Parameters, as a sampler gets them.
    tensors = [{name: tensor.float().clone() for name, tensor in p._trainable.published(None)} for p in policies]
    assert tensors[0].keys() == tensors[1].keys()
    apart["weights"] = [float((tensors[0][name] - tensors[1][name]).abs().max()) for name in tensors[0]]
    told = {"apart": apart, "used": sorted({*used})}
    used.clear()
    return told

print(json.dumps([asyncio.run(compared(folder)) for folder in sys.argv[1:]]))
"""


@pytest.mark.megatron
@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_it_must_be_installed() -> None:
    config = PolicyConfig.model_validate({"model": MODEL, "backend": "megatron", **ENGINE})
    with pytest.raises(ConfigError, match=r"Transformer Engine from 2\.9 to before 2\.12, but none is installed here"):
        MegatronPolicy(config)


@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.wide
def test_its_modules_stand_in_the_places_of_ours(model_of: ModelOf) -> None:
    folders = [model_of(shape, noise=0) for shape in (BIASED, EXPERTS)]
    command = [sys.executable, "-c", SCRIPT, *folders]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for told in json.loads(run.stdout.splitlines()[-1]):
        assert {*told["used"]} == MODULES
        assert all(each < 1e-5 for part in told["apart"].values() for each in part), told["apart"]
