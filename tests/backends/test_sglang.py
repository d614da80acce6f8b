"""What is particular to SGLang: its kernels' stand-ins on a CPU, and what it says of a tensor that it was given."""

import sys
from importlib import resources
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import pytest
import torch

from meshrl_sglang.proof import read_back


class Manager:
    """SGLang's, which tells what it was given."""

    def __init__(self, told: object) -> None:
        self.told = told

    async def get_weights_by_name(self, asked: SimpleNamespace) -> object:
        assert asked.name == "head"
        return self.told


async def test_a_tensor_that_is_another_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    asked = SimpleNamespace(GetWeightsByNameReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", asked)
    sent = [("head", torch.arange(6.0).reshape(3, 2))]
    await read_back(Manager([[0.0, 1.0], [2.0, 3.0]]), sent)
    with pytest.raises(RuntimeError, match="another `head`"):
        await read_back(Manager([[0.0, 1.0], [2.0, 4.0]]), sent)
    with pytest.raises(RuntimeError, match="cannot tell `head`"):
        await read_back(Manager(None), sent)


def test_the_numbers_that_draws_hang_on_are_those_of_sglang() -> None:
    """MurmurHash3's 32 bits, with the seed 0, of the little-endian bytes of seed (8), place (4) and column (4)."""
    path = resources.files("meshrl_sglang") / "standins/sgl_kernel/__init__.py"
    spec = spec_from_file_location("sgl_kernel", str(path))
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))
    seeds, places = [0, 1, 2**32, 2**63 - 1, 1234567890123456789], [0, 1, 17, 2**31 - 1, 2**32 - 1]
    found = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(places), torch.tensor([0, 3, 151_935])
    )
    assert found.dtype == torch.uint32
    assert found.tolist() == [
        [0x8134CDF8, 0x518A6E8E, 0x3F84409F],
        [0x292ACAE6, 0x83F11A1F, 0x2CF31A89],
        [0xCB89F728, 0xD4180260, 0x39699F1C],
        [0x5180997A, 0xC4845DE0, 0xBE2D0608],
        [0xE90FAE73, 0x3F8D6BF7, 0xDCE1C7C4],
    ]
