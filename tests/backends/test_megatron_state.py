"""Checkpoints of Megatron's stages: one layout of ranks reads what another wrote, also of the backend fsdp."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Final, TypeVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from meshrl import Batch, ClippedLoss, CriticConfig, NewModel, PolicyConfig, Ragged, ValueLoss
from meshrl.errors import ModelError
from meshrl_fsdp.critic import FsdpCritic
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_hf.ranks import RankGroup
from meshrl_hf.spread_state import MOMENTS
from meshrl_megatron.naming import Piece, Place, Shape, pieces
from meshrl_megatron.state import State

if TYPE_CHECKING:
    from meshrl_megatron.optimizer import Trained

T = TypeVar("T")
SHAPE: Final = Shape(hidden=16, heads=4, groups=4, head_dim=4, ffn=24, vocabulary=11, tied=True)
MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=4, max_tokens=48)
LAYER: dict[str, Callable[[int], tuple[int, ...]]] = {
    "input_layernorm.weight": lambda _: (16,),
    "self_attention.linear_qkv.weight": lambda tp: (48 // tp, 16),
    "self_attention.linear_proj.weight": lambda tp: (16, 16 // tp),
    "pre_mlp_layernorm.weight": lambda _: (16,),
    "mlp.linear_fc1.weight": lambda tp: (48 // tp, 16),
    "mlp.linear_fc2.weight": lambda tp: (16, 24 // tp),
}
ENDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "decoder.final_layernorm.weight": lambda _: (16,),
    "value_head.weight": lambda _: (1, 16),
    "value_head.bias": lambda _: (1,),
}


@dataclass
class Held:
    """What a rank holds of a model of two layers."""

    place: Place
    stages: int = 1
    replica: int = 0
    shape_: Shape = SHAPE
    valued: bool = False
    steps: int = 0
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])

    def names(self) -> Sequence[str]:
        first, last = not self.place.first_layer, bool(self.place.first_layer) or self.stages == 1
        copy = not self.valued and (self.stages > 1 or not self.shape_.tied)
        ends = ["decoder.final_layernorm.weight"] + ["output_layer.weight"] * copy
        ends += ["value_head.weight", "value_head.bias"] * self.valued
        layers = [f"decoder.layers.{layer}.{name}" for layer in range(2 // self.stages) for name in LAYER]
        return ["embedding.word_embeddings.weight"] * first + layers + ends * last

    def shape(self, name: str) -> tuple[int, ...]:
        if "word_embeddings" in name or "output_layer" in name:
            return self.shape_.padded(self.place.tp_size) // self.place.tp_size, 16
        return (LAYER | ENDS)[name.partition("layers.")[2][2:] or name](self.place.tp_size)

    def pieces(self, name: str) -> list[Piece]:
        return pieces(name, self.shape_, self.place)

    def is_writer(self, name: str) -> bool:
        split = self.place.tp_size > 1 and "norm" not in name and "value_head" not in name
        copy = name == "output_layer.weight" and self.shape_.tied
        return not self.replica and (split or not self.place.tp) and not copy

    def parameter(self, name: str) -> Tensor:
        return self.kept["parameter"][name]

    def moments(self, name: str) -> dict[str, Tensor]:
        return {moment: self.kept[moment][name] for moment in MOMENTS}

    def begin(self, steps: int) -> None:
        self.steps, self.kept = steps, {kind: {} for kind in ("parameter", *MOMENTS)}

    def take(self, name: str, kind: str, tensor: Tensor) -> None:
        assert tensor.shape == self.shape(name)
        self.kept[kind][name] = tensor.clone()

    def filled(self, whole: Mapping[str, Mapping[str, Tensor]]) -> "Held":
        """Take its parts of whole tensors; padding is NaN."""
        self.begin(5)
        for kind, tensors in whole.items():
            for name in self.names():
                local = torch.full(self.shape(name), torch.nan)
                for piece in self.pieces(name):
                    piece.view(local).copy_(part_of(tensors[piece.name], piece, piece.view(local)))
                self.take(name, kind, local)
        return self

    def check(self, whole: Mapping[str, Mapping[str, Tensor]]) -> None:
        for kind, tensors in whole.items():
            for name in self.names():
                for piece in self.pieces(name):
                    view = piece.view(self.kept[kind][name])
                    assert torch.equal(view, part_of(tensors[piece.name], piece, view)), (kind, name)


def part_of(whole: Tensor, piece: Piece, like: Tensor) -> Tensor:
    assert tuple(whole.shape) == piece.size
    for dim, (start, length) in enumerate(zip(piece.offsets, like.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


@dataclass(frozen=True)
class Pretended(RankGroup):
    """Ranks that are threads."""

    outcomes: list[object]
    meeting: Barrier

    @property
    def number(self) -> int:
        return self.place[0]

    def agree(self, work: Callable[[], T]) -> list[T]:
        try:
            self.outcomes[self.number] = work()
        except ModelError as error:
            self.outcomes[self.number] = error
        self.meeting.wait(20)
        outcomes = list(self.outcomes)
        self.meeting.wait(20)
        for each in outcomes:
            if isinstance(each, ModelError):
                raise each
        return cast("list[T]", outcomes)


def layout(tp: int, pp: int = 1, dp: int = 1, *, shape: Shape = SHAPE, valued: bool = False) -> list[Held]:
    return [
        Held(Place(rank, tp, stage), pp, replica, shape, valued)
        for replica in range(dp)
        for stage in range(pp)
        for rank in range(tp)
    ]


def together(ranks: list[Held], work: Callable[[State], None], role: str = "policy", body: str = "model") -> None:
    outcomes: list[object] = [None] * len(ranks)
    meeting = Barrier(len(ranks))

    def run(number: int) -> None:
        work(State(role, cast("Trained", ranks[number]), Pretended(len(ranks), (number,), outcomes, meeting), body))

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(run, range(len(ranks))))


def made(shape: Shape = SHAPE) -> dict[str, dict[str, Tensor]]:
    """Whole tensors by Hugging Face's names."""
    (one,) = layout(1, shape=shape)
    sizes = {piece.name: piece.size for name in one.names() for piece in one.pieces(name)}
    return {kind: {name: torch.rand(size) for name, size in sizes.items()} for kind in ("parameter", *MOMENTS)}


LAYOUTS = ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 2), (2, 2, 1))


@pytest.mark.parametrize(("tied", "wait"), [(True, False), (False, True)])
@pytest.mark.parametrize("written", LAYOUTS)
def test_what_one_layout_writes_any_other_reads(
    tmp_path: Path, written: tuple[int, int, int], tied: bool, wait: bool
) -> None:
    shape = Shape(16, 4, 4, 4, 24, 11, tied)
    whole = made(shape)
    ranks = [each.filled(whole) for each in layout(*written, shape=shape)]

    def write(state: State) -> None:
        state.write(str(tmp_path), wait)
        if not wait:
            for tensors in cast("Held", state._trained).kept.values():
                for tensor in tensors.values():
                    tensor.zero_()  # a copy is written
        asyncio.run(state.written())

    together(ranks, write)
    for read in LAYOUTS:
        others = layout(*read, shape=shape)
        together(others, lambda state: state.read(str(tmp_path)))
        for each in others:
            each.check(whole)
            assert each.steps == 5


def test_before_the_first_step_there_are_no_moments(tmp_path: Path) -> None:
    whole = {"parameter": made()["parameter"]}
    ranks = [each.filled(whole) for each in layout(2)]
    for each in ranks:
        each.steps = 0
    together(ranks, lambda state: state.write(str(tmp_path), wait=True))
    (other,) = layout(1)
    together([other], lambda state: state.read(str(tmp_path)))
    other.check(whole)
    assert not other.steps
    assert not other.kept["exp_avg"]


def rollouts() -> Batch:
    rng = np.random.default_rng(0)
    tokens = Ragged.of([rng.integers(2, 11, 7) for _ in range(6)], np.int32)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged(np.tile(np.arange(7) >= 3, 6), tokens.offsets),
        sampler_logprobs=Ragged(np.full(42, -2.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=6).astype(np.float32),
        values=Ragged(np.zeros(42, np.float32), tokens.offsets),
        returns=Ragged(np.ones(42, np.float32), tokens.offsets),
    )


async def test_the_backend_fsdp_reads_and_writes_the_same(tmp_path: Path) -> None:
    source, target = (FsdpPolicy(PolicyConfig(model=MODEL, seed=seed)) for seed in range(2))
    await source.update(rollouts(), ClippedLoss())
    await source.checkpoint(str(tmp_path / "fsdp"))
    ranks = layout(2, 2)
    together(ranks, lambda state: state.read(str(tmp_path / "fsdp")))
    tensors = (await source.weights()).tensors
    for each in ranks:
        each.check({"parameter": {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}})
        assert each.steps == 1
    together(ranks, lambda state: state.write(str(tmp_path / "state"), wait=True))
    await target.restore(str(tmp_path / "state"))
    for policy in (source, target):
        await policy.update(rollouts(), ClippedLoss())  # moves by the moments too
    for one, two in zip(tensors.values(), (await target.weights()).tensors.values(), strict=True):
        assert not np.array_equal(one, two)
    for one, two in zip(*[(await each.weights()).tensors.values() for each in (source, target)], strict=True):
        np.testing.assert_array_equal(one, two)


async def test_a_critic_has_the_names_of_the_backend_fsdp(tmp_path: Path) -> None:
    critic = FsdpCritic(CriticConfig(model=MODEL))
    await critic.update(rollouts(), ValueLoss())
    await critic.checkpoint(str(tmp_path / "fsdp"))
    ranks = layout(2, valued=True)
    together(ranks, lambda state: state.read(str(tmp_path / "fsdp")), "critic", "body")
    assert ranks[1].kept["parameter"]["value_head.bias"].item()
    together(ranks, lambda state: state.write(str(tmp_path / "state"), wait=True), "critic", "body")
    await critic.restore(str(tmp_path / "state"))


def test_a_state_of_something_else_is_refused_and_nothing_taken(tmp_path: Path) -> None:
    ranks = [each.filled(made()) for each in layout(2)]
    together(ranks, lambda state: state.write(str(tmp_path), wait=True))
    before = [dict(each.kept) for each in ranks]

    def refused(text: str, role: str = "policy", body: str = "model", others: list[Held] = ranks) -> None:
        with pytest.raises(ModelError, match=text):
            together(others, lambda state: state.read(str(tmp_path)), role, body)

    refused("is the state of a policy, not of a critic; resume with", role="critic")
    refused("of another policy: `body.embed_tokens.weight` is missing there and .11, 16. here; resume", body="body")
    larger = layout(1, shape=Shape(16, 4, 4, 4, 24, 12, tied=True))
    refused(r"of another policy: `model.embed_tokens.weight` is \[11, 16\] there and \[12, 16\] here", others=larger)
    files = sorted(tmp_path.glob("*.safetensors"))
    content = files[0].read_bytes()
    files[0].write_bytes(content[:100])
    refused(r"cannot be read as the state of a policy: SafetensorError.*Remove the checkpoint")
    files[0].write_bytes(content)
    files[1].unlink()
    refused(r"has the files of 1 ranks and not of 2\. Remove the checkpoint")
    files[1].write_bytes(content)
    refused(r"lacks a part of `model.embed_tokens.weight`, or has it twice")
    assert [each.kept for each in ranks] == before


def test_what_cannot_be_written_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "shard-00002-model-00001-of-00001.safetensors").mkdir()
    ranks = [each.filled(made()) for each in layout(2)]
    with pytest.raises(ModelError, match=f"{tmp_path} cannot be written"):
        together(ranks, lambda state: state.write(str(tmp_path), wait=True))


def test_a_state_that_was_taken_in_part_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [each.filled(made()) for each in layout(2)]
    together(ranks, lambda state: state.write(str(tmp_path), wait=True))

    def fail(*args: object) -> None:
        raise ModelError("the disk is gone")

    monkeypatch.setattr("meshrl_megatron.state.Boxes.read", fail)
    with pytest.raises(ModelError, match=r"the disk is gone. The policy has loaded a part of it and cannot be used"):
        together(ranks, lambda state: state.read(str(tmp_path)))
