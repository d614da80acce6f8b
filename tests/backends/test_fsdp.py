"""FSDP2 on one rank: what its options change, and what they do not."""

from collections.abc import Callable
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from meshrl import Batch, ClippedLoss, CriticConfig, PolicyConfig
from meshrl.errors import ConfigError, ModelError
from meshrl_fsdp.optimizer import ShardedOptimizer
from meshrl_fsdp.options import FsdpConfig
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_fsdp.world import grid_of
from meshrl_hf.boxes import write_boxes
from meshrl_torch.critic import TorchCritic
from meshrl_torch.policy import TorchPolicy
from tests.backends.material import MODEL, Late, floats, rollouts


def policy(**changes: object) -> FsdpPolicy:
    return FsdpPolicy(PolicyConfig.model_validate({"model": MODEL, "optimizer": {"lr": 1e-2}, **changes}))


def logprobs(batch: Batch) -> NDArray[np.float32]:
    return floats(batch.ragged("logprobs").values)


@pytest.mark.parametrize(
    "changes",
    [{"fsdp": {"reshard_after_forward": False}}, {"activation_checkpointing": True, "micro_batch_tokens": 8}],
    ids=str,
)
async def test_options_for_speed_and_memory_leave_the_numbers(
    small: str, tmp_path: Path, changes: dict[str, object]
) -> None:
    made, other, fresh = policy(model=small), policy(model=small, **changes), policy(model=small, **changes)
    for seed in range(3):  # each call may leave parameters whole, which the next must not take for new ones
        told = [(await each.update(rollouts(seed=seed), ClippedLoss())).means() for each in (made, other)]
        assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-6)
        one, two = [logprobs(await each.logprobs(rollouts(seed=9))) for each in (made, other)]
        np.testing.assert_allclose(one, two, atol=1e-4)
        await other.weights()
    await made.checkpoint(str(tmp_path / "state"))
    await fresh.logprobs(rollouts(seed=9))
    await fresh.restore(str(tmp_path / "state"))
    one, two = [logprobs(await each.logprobs(rollouts(seed=9))) for each in (made, fresh)]
    np.testing.assert_allclose(one, two, atol=1e-5)


def on_host(of: FsdpPolicy) -> list[bool]:
    """Of each moment, whether it lies in a buffer of the host's."""
    optimizer = of._trainable.optimizer
    assert isinstance(optimizer, ShardedOptimizer)
    hosts = {each.data_ptr() for each in optimizer._hosts.values()}
    return [moment.data_ptr() in hosts for name in ("exp_avg", "exp_avg_sq") for moment in optimizer.moments(name)]


@pytest.mark.bits
@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"gradient_sync": "last"}, "float32"), ({"prefetch": 2}, "bfloat16"), ({"offload_moments": True}, "bfloat16")],
    ids=str,
)
async def test_when_ranks_talk_and_where_moments_are_changes_no_bit(
    options: dict[str, object], dtype: str, tmp_path: Path
) -> None:
    plain, other = (policy(micro_batch_tokens=20, dtype=dtype, **each) for each in ({}, {"fsdp": options}))
    for seed in range(3):
        told = [(await each.update(rollouts(seed=seed), ClippedLoss())).means() for each in (plain, other)]
        assert told[0] == told[1]
        assert set(on_host(other)) == {"offload_moments" in options}
        await other.checkpoint(str(tmp_path / "state"))  # from which training continues, whatever the options are
        await plain.restore(str(tmp_path / "state"))
        await other.restore(str(tmp_path / "state"))
    assert await plain.weights() == await other.weights()


def test_the_neighbours_that_keep_parameters_divide_the_ranks() -> None:
    assert grid_of({"dp": 8}, FsdpConfig(reshard_after_forward=4)).shape == (1, 8, 1)
    with pytest.raises(ConfigError, match="reshard_after_forward = 3 does not divide the 8 ranks"):
        grid_of({"dp": 8}, FsdpConfig(reshard_after_forward=3))
    with pytest.raises(ConfigError, match="does not divide the 4 ranks"):
        grid_of({"dp": 8}, FsdpConfig(replicate=2, reshard_after_forward=8))


async def test_a_step_that_was_given_up_leaves_no_gradient_behind() -> None:
    for sync in ("each", "last"):
        made, fresh = (policy(micro_batch_tokens=20, fsdp={"gradient_sync": sync}) for _ in range(2))
        with pytest.raises(ZeroDivisionError):
            await made.update(rollouts(), Late())
        told = [(await each.update(rollouts(seed=1), ClippedLoss())).means() for each in (made, fresh)]
        assert told[0] == told[1], sync


async def test_bfloat16_is_computed_published_and_saved_while_float32_is_trained(tmp_path: Path) -> None:
    half, full = policy(dtype="bfloat16"), policy()
    for seed in range(3):
        told = [(await each.update(rollouts(seed=seed), ClippedLoss())).means() for each in (half, full)]
        assert told[0]["grad_norm"] == pytest.approx(told[1]["grad_norm"], rel=0.1)
        assert told[0] != told[1]
    assert {array.dtype.name for array in (await half.weights()).tensors.values()} == {"bfloat16"}
    await half.save(str(tmp_path / "model"))
    assert str(AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype) == "torch.bfloat16"
    await half.checkpoint(str(tmp_path / "state"))
    await full.restore(str(tmp_path / "state"))  # float32, as it was trained
    assert (await full.weights()).version == 3


async def test_files_that_cannot_be_read_or_written_are_told_with_what_to_do(tmp_path: Path) -> None:
    made = policy()
    await made.checkpoint(str(tmp_path))
    file = next(tmp_path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"cannot be read as the state of a policy.*Remove the checkpoint"):
        await made.restore(str(tmp_path))
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelError, match=rf"{tmp_path} cannot be written: .*directory"):
        await made.checkpoint(str(tmp_path))
    await made.checkpoint(str(tmp_path), wait=False)
    await made.checkpoint(str(tmp_path / "elsewhere"))
    await made.written()  # of the last alone


@pytest.mark.parametrize("backend", [FsdpPolicy, TorchPolicy])
async def test_a_checkpoint_that_is_written_meanwhile_is_of_its_own_step(
    backend: type[FsdpPolicy | TorchPolicy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updated, waited = Event(), list[bool]()

    def later(write: Callable[..., None]) -> Callable[..., None]:
        def writing(*arguments: object) -> None:
            waited.append(updated.wait(60))
            write(*arguments)

        return writing

    monkeypatch.setattr("meshrl_hf.state.save_file", later(save_file))
    monkeypatch.setattr("meshrl_hf.spread_state.write_boxes", later(write_boxes))
    made, other = (
        backend(PolicyConfig.model_validate({"model": MODEL, "optimizer": {"lr": 1e-2}, "seed": seed}))
        for seed in range(2)
    )
    await made.update(rollouts(), ClippedLoss())
    await made.checkpoint(str(tmp_path), wait=False)
    then = (await made.weights()).fingerprint()
    try:
        await made.update(rollouts(seed=1), ClippedLoss())
    finally:
        updated.set()
    await made.written()
    assert waited == [True], "it was written after the update"
    await other.restore(str(tmp_path))
    assert (await other.weights()).fingerprint() == then != (await made.weights()).fingerprint()
    await other.update(rollouts(seed=1), ClippedLoss())
    assert (await other.weights()).fingerprint() == (await made.weights()).fingerprint(), "and so are the moments"


async def test_a_checkpoint_of_another_backend_or_role_is_told_as_such(tmp_path: Path) -> None:
    made, other = policy(), TorchPolicy(PolicyConfig(model=MODEL))
    await made.update(rollouts(), ClippedLoss())
    await made.checkpoint(str(tmp_path / "fsdp"))
    with pytest.raises(ModelError, match=r"another backend has written: it has shard-00001.*reads state\.safetensors"):
        await other.restore(str(tmp_path / "fsdp"))
    await TorchCritic(CriticConfig(model=MODEL)).checkpoint(str(tmp_path / "critic"))
    with pytest.raises(ModelError, match=r"is the state of a critic, not of a policy"):
        await made.restore(str(tmp_path / "critic"))
    (tmp_path / "critic" / "state.json").write_text("")
    with pytest.raises(ModelError, match="another backend has written"):
        await made.restore(str(tmp_path / "critic"))


async def test_a_checkpoint_that_does_not_tell_its_files_is_read_by_torch_too(tmp_path: Path) -> None:
    made, fresh = policy(), policy(seed=1)
    await made.update(rollouts(), ClippedLoss())
    await made.checkpoint(str(tmp_path))
    (tmp_path / "state.json").write_text('{"role":"policy","steps":1}')
    await fresh.restore(str(tmp_path))
    assert await fresh.weights() == await made.weights()
    weights = (await made.weights()).tensors
    taken = {f"model/{name}": torch.zeros(array.shape) for name, array in weights.items()}
    load(taken, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    for name, array in weights.items():
        np.testing.assert_array_equal(taken[f"model/{name}"].numpy(), array)


def test_offloading_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="this rank has none"):
        policy(fsdp=FsdpConfig(cpu_offload=True))
