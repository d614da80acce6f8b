"""Megatron-Core on a machine without a GPU: what is rewritten, what is not, and what is refused."""

import ast
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from meshrl.errors import BackendError
from meshrl_megatron import cpu

FORMS = [
    ("torch.zeros(2, device=torch.cuda.current_device())", "torch.zeros(2, device=(lambda: 'cpu')())"),
    ("torch.zeros(2, device='cuda')", "torch.zeros(2, device='cpu')"),
    ("x.device.type == 'cuda'", "x.device.type == 'cpu'"),
    ("x.type() in ['torch.cuda.HalfTensor']", "x.type() in ['torch.HalfTensor']"),
    ("isinstance(x, torch.cuda.FloatTensor)", "isinstance(x, torch.FloatTensor)"),
    ("f(y.cuda(non_blocking=True)).cuda()", "f(y.cpu()).cpu()"),
    ("torch.empty(n, pin_memory=pinned).pin_memory()", "torch.empty(n, pin_memory=False).cpu()"),
    ("torch.cuda.synchronize()", "(lambda *_: None)()"),
    ("def _get_cuda_rng_state(d): return other()", "def _get_cuda_rng_state(d): return torch.get_rng_state()"),
    ("torch.cuda.Stream()", "torch.cpu.Stream()"),
    ("torch.cuda.current_stream()", "torch.cuda.current_stream()"),
    ("torch.backends.cuda.matmul", "torch.backends.cuda.matmul"),
    ("def f(): 'device=torch.cuda.made_up()'", "def f(): 'device=torch.cuda.made_up()'"),
]


def test_a_use_of_cuda_takes_its_cpu_form_on_its_line_and_an_unknown_one_is_refused() -> None:
    found = [(cuda, ast.unparse(cpu.rewritten(ast.parse(cuda), "megatron.core.part"))) for cuda, _ in FORMS]
    assert found == [(cuda, ast.unparse(ast.parse(plain))) for cuda, plain in FORMS]
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


def test_where_torch_has_a_gpu_nothing_is_rewritten_and_what_was_imported_as_it_is_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "meta_path", finders := list[object]())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu.install()
    assert not finders
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    with pytest.raises(BackendError, match=r"megatron\.core was imported before meshrl_megatron\.core"):
        cpu.install()


REAL = """
import sys, torch
before = dict(vars(torch.cuda))
import meshrl_megatron
assert not any(name.startswith("megatron") for name in sys.modules)
import meshrl_megatron.core as core
from meshrl_megatron import cpu
cpu.install()
assert sum(isinstance(finder, cpu._Finder) for finder in sys.meta_path) == 1
ours = {name for name, module in sys.modules.items() if isinstance(getattr(module, "__loader__", None), cpu._Loader)}
assert "megatron.core.tensor_parallel.layers" in ours
assert all(name.split(".")[:2] == ["megatron", "core"] for name in ours), ours
assert {name: value for name, value in vars(torch.cuda).items() if name in before} == before
with core.quiet():
    core.TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states
states = _get_all_rng_states()
first = torch.rand(3)
_set_all_rng_states(*states)
assert torch.equal(torch.rand(3), first)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs as it is")
def test_the_real_library_is_imported_without_a_warning_and_nothing_else_is_touched() -> None:
    command = [sys.executable, "-W", "error", "-c", REAL]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
