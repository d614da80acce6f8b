"""FSDP2 on one rank: what its options change, and what they do not."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from meshrl import Batch, ClippedLoss, CriticConfig, NewModel, PolicyConfig, Ragged, ReferenceConfig
from meshrl.errors import ConfigError, ModelError
from meshrl.losses import TokenLoss
from meshrl_fsdp.optimizer import ShardedOptimizer
from meshrl_fsdp.options import FsdpConfig
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_fsdp.reference import FsdpReference
from meshrl_fsdp.sharded import Sharded
from meshrl_fsdp.world import grid_of
from meshrl_torch.critic import TorchCritic
from meshrl_torch.policy import TorchPolicy

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)


def policy(**changes: object) -> FsdpPolicy:
    return FsdpPolicy(PolicyConfig.model_validate({"model": MODEL, "optimizer": {"lr": 1e-2}, **changes}))


def rollouts(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = Ragged.of([rng.integers(2, 11, 7) for _ in range(6)], np.int32)
    return Batch.of(
        tokens=tokens,
        loss_mask=Ragged(np.tile(np.arange(7) >= 3, 6), tokens.offsets),
        sampler_logprobs=Ragged(np.full(42, -2.0, np.float32), tokens.offsets),
        advantages=rng.normal(size=6).astype(np.float32),
    )


@pytest.mark.parametrize(
    "changes",
    [{"fsdp": {"reshard_after_forward": False}}, {"activation_checkpointing": True}, {"micro_batch_tokens": 8}],
    ids=str,
)
async def test_options_for_speed_and_memory_leave_the_numbers(tmp_path: Path, changes: dict[str, object]) -> None:
    plain = policy()
    await plain.save(str(tmp_path / "model"))
    for other in (policy(**changes), policy(**changes, model=str(tmp_path / "model"))):
        made = policy()
        for seed in range(3):  # each call may leave parameters whole, which the next must not take for new ones
            told = [(await each.update(rollouts(seed), ClippedLoss())).means() for each in (made, other)]
            assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-6)
            one, two = [(await each.logprobs(rollouts(9))).ragged("logprobs").values for each in (made, other)]
            np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(two, np.float32), atol=1e-4)
            await other.weights()
        await made.checkpoint(str(tmp_path / f"state-{id(other)}"))
        fresh = policy(**changes)
        await fresh.logprobs(rollouts(9))
        await fresh.restore(str(tmp_path / f"state-{id(other)}"))
        values = [(await each.logprobs(rollouts(9))).ragged("logprobs").values for each in (made, fresh)]
        np.testing.assert_allclose(np.asarray(values[0], np.float32), np.asarray(values[1], np.float32), atol=1e-6)


@pytest.mark.bits
@pytest.mark.parametrize("options", [{"gradient_sync": "last"}, {"prefetch": 2}, {"offload_moments": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_when_ranks_talk_changes_no_bit(options: dict[str, object], dtype: str) -> None:
    plain, other = (policy(micro_batch_tokens=8, dtype=dtype, **each) for each in ({}, {"fsdp": options}))
    for seed in range(3):
        told = [(await each.update(rollouts(seed), ClippedLoss())).means() for each in (plain, other)]
        assert told[0] == told[1]
    one, two = [await each.weights() for each in (plain, other)]
    for name, array in one.tensors.items():
        np.testing.assert_array_equal(array, two.tensors[name])


async def test_moments_are_on_the_host_but_for_the_step_and_go_into_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, moves = policy(), policy(fsdp={"offload_moments": True})
    optimizer = moves._trainable.optimizer
    assert isinstance(optimizer, ShardedOptimizer)
    during: list[bool] = []

    def brought(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.clone()  # as a copy on another device would be

    def on_host() -> list[bool]:
        hosts = {each.data_ptr() for each in optimizer._hosts.values()}
        return [moment.data_ptr() in hosts for name in ("exp_avg", "exp_avg_sq") for moment in optimizer.moments(name)]

    monkeypatch.setattr("meshrl_fsdp.optimizer.moved", brought)
    monkeypatch.setattr(optimizer, "_round", lambda: during.extend(on_host()))  # which float32 has no need of
    for seed in range(3):
        for each in (stays, moves):
            await each.update(rollouts(seed), ClippedLoss())
        assert all(on_host())
    assert not any(during)
    await moves.checkpoint(str(tmp_path / "state"))
    await stays.restore(str(tmp_path / "state"))
    again = policy(fsdp={"offload_moments": True})
    await again.restore(str(tmp_path / "state"))
    told = [(await each.update(rollouts(9), ClippedLoss())).means() for each in (moves, stays, again)]
    assert told[0] == told[1] == told[2]
    one, *others = [await each.weights() for each in (moves, stays, again)]
    for other in others:
        for name, array in one.tensors.items():
            np.testing.assert_array_equal(array, other.tensors[name])


async def test_gradients_are_summed_over_the_ranks_after_each_pass_or_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[bool, bool]] = []
    begin = Sharded.begin

    def spied(sharded: Sharded, last: bool) -> None:
        begin(sharded, last)
        groups = [
            each._get_fsdp_state()._fsdp_param_group for each in sharded.root.modules() if isinstance(each, FSDPModule)
        ]
        told.append((last, all(group.reduce_grads for group in groups if group)))

    monkeypatch.setattr(Sharded, "begin", spied)
    for sync, early in (("each", True), ("last", False)):
        told.clear()
        trainer = policy(micro_batch_tokens=8, fsdp={"gradient_sync": sync})
        await trainer.update(rollouts(), ClippedLoss())
        assert told == [(False, early)] * 5 + [(True, True)]


def test_the_neighbours_that_keep_parameters_divide_the_ranks() -> None:
    assert grid_of({"dp": 8}, FsdpConfig(reshard_after_forward=4)).shape == (1, 8, 1)
    with pytest.raises(ConfigError, match="reshard_after_forward = 3 does not divide the 8 ranks"):
        grid_of({"dp": 8}, FsdpConfig(reshard_after_forward=3))
    with pytest.raises(ConfigError, match="does not divide the 4 ranks"):
        grid_of({"dp": 8}, FsdpConfig(replicate=2, reshard_after_forward=8))


class _Breaks(ClippedLoss):
    """In its second pass, once."""

    passes: ClassVar[int] = 0

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        type(self).passes += 1
        if self.passes == 2:
            raise ValueError("the second pass")
        return super().__call__(logprobs, columns)


@pytest.mark.parametrize("sync", ["each", "last"])
async def test_a_step_that_was_given_up_leaves_no_gradient_behind(sync: str) -> None:
    _Breaks.passes = 0
    made, fresh = (policy(micro_batch_tokens=8, fsdp={"gradient_sync": sync}) for _ in range(2))
    with pytest.raises(ValueError, match="the second pass"):
        await made.update(rollouts(), _Breaks())
    told = [(await each.update(rollouts(1), ClippedLoss())).means() for each in (made, fresh)]
    assert told[0] == told[1]


async def test_bfloat16_is_computed_published_and_saved_while_float32_is_trained(tmp_path: Path) -> None:
    half, full = policy(dtype="bfloat16"), policy()
    for seed in range(3):
        told = [(await each.update(rollouts(seed), ClippedLoss())).means() for each in (half, full)]
        assert told[0]["grad_norm"] == pytest.approx(told[1]["grad_norm"], rel=0.1)
        assert told[0] != told[1]
    assert {array.dtype.name for array in (await half.weights()).tensors.values()} == {"bfloat16"}
    await half.save(str(tmp_path / "model"))
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype) == "torch.bfloat16"
    await half.checkpoint(str(tmp_path / "state"))
    await full.restore(str(tmp_path / "state"))  # float32, as it was trained
    assert (await full.weights()).version == 3


async def test_a_reference_takes_weights_of_its_own_dtype_alone() -> None:
    half, full = [
        FsdpReference(ReferenceConfig.model_validate({"model": MODEL, "dtype": dtype, "seed": 1}))
        for dtype in ("bfloat16", "float32")
    ]
    made = policy(dtype="bfloat16")
    await half.load(await made.weights())
    expected = (await made.logprobs(rollouts())).ragged("logprobs").values
    found = (await half.logprobs(rollouts())).ragged("reference_logprobs").values
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    with pytest.raises(ModelError, match=r"is bfloat16\[11, 16\] and the model has float32\[11, 16\]: give the policy"):
        await full.load(await made.weights())


async def test_a_damaged_file_is_told_with_what_to_do(tmp_path: Path) -> None:
    made = policy()
    await made.checkpoint(str(tmp_path / "state"))
    file = next((tmp_path / "state").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"cannot be read as the state of a policy.*Remove the checkpoint"):
        await made.restore(str(tmp_path / "state"))


async def test_a_checkpoint_of_another_backend_is_told_as_such(tmp_path: Path) -> None:
    other = TorchPolicy(PolicyConfig(model=MODEL))
    for steps in range(2):
        for each, folder in ((policy(), tmp_path / f"fsdp-{steps}"), (other, tmp_path / f"torch-{steps}")):
            if steps:
                await each.update(rollouts(), ClippedLoss())
            await each.checkpoint(str(folder))
        of_ranks, of_one = r"shard-00001\S+ .*reads state\.safetensors", r"has state\.safetensors, .* reads shard-\*"
        with pytest.raises(ModelError, match=f"another backend has written: it has {of_ranks}.*Nothing is wrong"):
            await other.restore(str(tmp_path / f"fsdp-{steps}"))
        with pytest.raises(ModelError, match=f"another backend has written: it {of_one}"):
            await policy().restore(str(tmp_path / f"torch-{steps}"))


async def test_a_checkpoint_of_another_role_and_backend_is_told_as_one_of_another_role(tmp_path: Path) -> None:
    await TorchCritic(CriticConfig(model=MODEL)).checkpoint(str(tmp_path))
    with pytest.raises(ModelError, match=r"is the state of a critic, not of a policy"):
        await policy().restore(str(tmp_path))
    (tmp_path / "state.json").write_text("")
    with pytest.raises(ModelError, match="another backend has written"):
        await policy().restore(str(tmp_path))


async def test_a_checkpoint_that_does_not_tell_its_files_is_read(tmp_path: Path) -> None:
    made, fresh = policy(), policy(seed=1)
    await made.update(rollouts(), ClippedLoss())
    await made.checkpoint(str(tmp_path))
    (tmp_path / "state.json").write_text('{"role":"policy","steps":1}')
    await fresh.restore(str(tmp_path))
    assert await fresh.weights() == await made.weights()


async def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    made = policy()
    await made.update(rollouts(), ClippedLoss())
    await made.checkpoint(str(tmp_path))
    weights = (await made.weights()).tensors
    taken = {f"model/{name}": torch.zeros(array.shape) for name, array in weights.items()}
    load(taken, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    for name, array in weights.items():
        np.testing.assert_array_equal(taken[f"model/{name}"].numpy(), array)


async def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    made = policy()
    await made.checkpoint(str(tmp_path))
    file = next(tmp_path.glob("*.safetensors"))
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelError, match=rf"{tmp_path} cannot be written: .*directory"):
        await made.checkpoint(str(tmp_path))
    await made.checkpoint(str(tmp_path), wait=False)
    await made.checkpoint(str(tmp_path / "elsewhere"))
    await made.written()  # of the last alone


def test_offloading_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="this rank has none"):
        policy(fsdp=FsdpConfig(cpu_offload=True))
