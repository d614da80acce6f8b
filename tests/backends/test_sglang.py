"""What is particular to SGLang: its kernels' stand-ins on a CPU, and what it says of a tensor that it was given."""

import struct
import sys
from importlib import resources
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import pytest
import torch

from meshrl_sglang.proof import read_back

_WORD = 0xFFFFFFFF


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


def murmur3(key: bytes) -> int:
    """MurmurHash3's 32 bits of whole words with the seed 0, as its author gives it."""

    def rotated(value: int, by: int) -> int:
        return (value << by | value >> (32 - by)) & _WORD

    found = 0
    for (block,) in struct.iter_unpack("<I", key):
        found ^= rotated(block * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
        found = (rotated(found, 13) * 5 + 0xE6546B64) & _WORD
    found ^= len(key)
    found = (found ^ found >> 16) * 0x85EBCA6B & _WORD
    found = (found ^ found >> 13) * 0xC2B2AE35 & _WORD
    return found ^ found >> 16


def test_the_numbers_that_draws_hang_on_are_those_of_sglang() -> None:
    assert murmur3(b"") == 0
    assert murmur3(b"\xff\xff\xff\xff") == 0x76293B50  # its known answers
    assert murmur3(b"\x21\x43\x65\x87") == 0xF55B516B
    path = resources.files("meshrl_sglang") / "standins/sgl_kernel/__init__.py"
    spec = spec_from_file_location("sgl_kernel", str(path))
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))
    seeds = [0, 1, 2**32, 2**63 - 1, 1234567890123456789]
    places, columns = [0, 1, 17, 2**31 - 1, 2**32 - 1], [0, 3, 151_935]
    found = torch.ops.sgl_kernel.murmur_hash32_cpu(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(places), torch.tensor(columns)
    )
    assert found.dtype == torch.uint32
    assert found.tolist() == [
        [murmur3(struct.pack("<QII", seed, place, column)) for column in columns]
        for seed, place in zip(seeds, places, strict=True)
    ]
