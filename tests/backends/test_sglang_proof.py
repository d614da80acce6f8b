"""What SGLang says of a tensor is compared with what was sent. SGLang is stood in for."""

import sys
from types import SimpleNamespace

import pytest
import torch

from meshrl_sglang.proof import read_back


class Manager:
    """Tells what it was given."""

    def __init__(self, told: object) -> None:
        self.told = told

    async def get_weights_by_name(self, asked: SimpleNamespace) -> object:
        assert asked.name == "head"
        return self.told


@pytest.mark.parametrize(
    ("told", "error"),
    [([[0.0, 1.0], [2.0, 3.0]], None), ([[0.0, 1.0], [2.0, 4.0]], "another `head`"), (None, "cannot tell `head`")],
)
async def test_a_tensor_that_is_another_is_an_error(
    told: object, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace())
    for name in ("sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    asked = SimpleNamespace(GetWeightsByNameReqInput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", asked)
    sent = [("head", torch.arange(6.0).reshape(3, 2))]
    if error is None:
        await read_back(Manager(told), sent)
    else:
        with pytest.raises(RuntimeError, match=error):
            await read_back(Manager(told), sent)
