"""Policies whose ranks round matrices to FP8 before they send them."""

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from meshrl import ClippedLoss, Mesh, NewModel
from meshrl.engines.processes import ProcessEngine
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_hf import fp8
from meshrl_hf.live_weights import LiveWeights
from meshrl_hf.offer import SCALE
from meshrl_inference.assembly import read
from meshrl_megatron.policy import MegatronPolicy
from tests.processes.conftest import NO_CORE
from tests.processes.test_broadcast import config, rollouts

if TYPE_CHECKING:
    from meshrl_inference.naming import Naming

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

MODULES = ["meshrl_fsdp.policy", "meshrl_megatron.policy"]
ODD = NewModel(characters="abcdefgh>", hidden_size=252, ffn_size=509, layers=2, heads=3, max_tokens=48)
"""Two ranks have different numbers of rows of some matrices. Buckets have the smallest size."""
EVEN = NewModel(characters="abcdefgh>", hidden_size=256, ffn_size=512, layers=2, heads=2, max_tokens=48)
COLUMNS = ("o_proj.weight", "down_proj.weight")
"""The ends of names of matrices that `tp` splits along their columns."""


class Plain:
    """Names as they are, each tensor by itself."""

    def unit(self, name: str) -> str:
        """Itself."""
        return name.removesuffix(SCALE)

    def in_files(self, tensors: Any) -> Any:
        """As they are."""
        return tensors


def received(weights: LiveWeights) -> dict[str, torch.Tensor]:
    """What an engine gets, in this process."""
    came: dict[str, torch.Tensor] = {}
    naming = cast("Naming", Plain())
    outcome = read(weights.offer, 1, naming, torch.device("cpu"), came.clear, lambda more: came.update(dict(more)))
    assert outcome.way, outcome
    return came


@pytest.mark.parametrize(
    ("policy", "model", "axes"),
    [
        (FsdpPolicy, ODD, {"dp": 2}),
        pytest.param(FsdpPolicy, EVEN, {"tp": 2}, marks=pytest.mark.wide),
        pytest.param(MegatronPolicy, EVEN, {"tp": 2}, marks=pytest.mark.megatron),
    ],
    ids=["fsdp", "fsdp tp", "megatron tp"],
)
async def test_whole_rows_come_rounded_and_columns_as_they_are(
    engine: ProcessEngine, policy: type[FsdpPolicy], model: NewModel, axes: dict[str, int]
) -> None:
    mesh = await Mesh.reserve(engine, 2, NO_CORE)
    shaped = mesh.shape(**({"dp": 1} | axes))
    kind = "fsdp" if policy is FsdpPolicy else "megatron"
    rounding = await shaped.spawn(policy, config(backend=kind, model=model, weight_sync_dtype="fp8"))
    whole = await shaped.spawn(policy, config(backend=kind, model=model, weight_sync="auto"))
    for version in (1, 2):
        for each in (rounding, whole):
            await each.update(rollouts(version), ClippedLoss())
        sent, known = await rounding.weights(), (await (await whole.weights()).load()).tensors
        assert isinstance(sent, LiveWeights)
        came = received(sent)
        rounded = {name for name in known if name.endswith("_proj.weight")}
        if "tp" in axes:
            rounded = {name for name in rounded if not name.endswith(COLUMNS)}
        assert sent.offer.in_fp8 == rounded
        assert came.keys() == known.keys() | {name + SCALE for name in rounded}
        for name, array in known.items():
            tensor = torch.from_numpy(array.copy())
            if name in rounded:
                numbers, scales = fp8.quantized(tensor)
                assert torch.equal(came[name].view(torch.uint8), numbers.view(torch.uint8))
                assert torch.equal(came[name + SCALE], scales)
            else:
                assert torch.equal(came[name], tensor)
    await mesh.stop()
