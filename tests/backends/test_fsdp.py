"""FSDP2 on one rank: what its options change, and what they do not; adapters; what a step of a backend waits for."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Event, Timer
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from meshrl import Batch, ClippedLoss, PolicyConfig, SamplerConfig, Sampling, Weights
from meshrl import rollout as drawn_by
from meshrl.algo import TokenLoss
from meshrl.config import validate
from meshrl.errors import ConfigError, ModelError
from meshrl.roles import LoraConfig, OptimizerConfig, Policy
from meshrl.run import AlgorithmConfig
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.checkpoint.boxes import write_boxes
from meshrl_torch.options import FsdpConfig
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.train.fsdp.world import grid_of
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.material import MODEL, Counted, Late, Watched, floats, near, rollouts, updated

Trained: TypeAlias = TorchPolicy | FsdpPolicy
Backend: TypeAlias = type[Trained]
QUICK = OptimizerConfig(lr=1e-2)
EACH = pytest.mark.parametrize("backend", [FsdpPolicy, TorchPolicy])


def policy(backend: Backend = FsdpPolicy, /, **changes: object) -> Trained:
    return backend(PolicyConfig.model_validate({"model": MODEL, "optimizer": QUICK, **changes}))


async def alike(one: Policy, other: Policy, atol: float) -> None:
    found, expected = [(await each.logprobs(rollouts(seed=9))).ragged("logprobs").values for each in (one, other)]
    np.testing.assert_allclose(floats(found), floats(expected), atol=atol)


async def test_options_for_speed_or_memory_keep_numbers(small: str, tmp_path: Path) -> None:
    options = {"fsdp": {"reshard_after_forward": False}, "activation_checkpointing": True, "micro_batch_tokens": 8}
    made, other, fresh = policy(model=small), policy(model=small, **options), policy(model=small, **options)
    for seed in range(3):  # each call may leave parameters whole, which the next must not take for new ones
        told = await updated(made, other, seed=seed)
        assert told[0] == pytest.approx(told[1], rel=1e-4, abs=1e-6)
        await alike(made, other, 1e-4)
        await other.weights()
    await made.checkpoint(str(tmp_path / "state"))
    await fresh.logprobs(rollouts(seed=9))
    await fresh.restore(str(tmp_path / "state"))
    await alike(made, fresh, 1e-5)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"gradient_sync": "last"}, "float32"), ({"prefetch": 2}, "bfloat16"), ({"offload_moments": True}, "bfloat16")],
    ids=str,
)
async def test_when_ranks_talk_changes_no_bit(options: dict[str, object], dtype: str, tmp_path: Path) -> None:
    plain, other = (policy(micro_batch_tokens=20, dtype=dtype, **each) for each in ({}, {"fsdp": options}))
    for seed in range(3):
        told = await updated(plain, other, seed=seed)
        assert told[0] == told[1]
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
    with pytest.raises(ConfigError, match="this rank has none"):
        policy(fsdp=FsdpConfig(cpu_offload=True))


async def test_a_step_that_was_given_up_leaves_no_gradient_behind() -> None:
    for backend, sync in ((TorchPolicy, "each"), (FsdpPolicy, "each"), (FsdpPolicy, "last")):
        options = {} if backend is TorchPolicy else {"fsdp": {"gradient_sync": sync}}
        made, fresh = (policy(backend, micro_batch_tokens=20, **options) for _ in range(2))
        with pytest.raises(ZeroDivisionError):
            await made.update(rollouts(), Late())
        told = await updated(made, fresh, seed=1)
        assert told[0] == told[1], (backend, sync)
        assert await made.weights() == await fresh.weights()


@EACH
async def test_bfloat16_is_computed_published_and_saved_while_float32_is_trained(
    backend: Backend, tmp_path: Path
) -> None:
    half, full = policy(backend, dtype="bfloat16", micro_batch_tokens=20), policy(backend, micro_batch_tokens=20)
    for seed in range(3):
        told = await updated(half, full, seed=seed)
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
    file.with_name(f"{file.name}.sums").unlink()
    with pytest.raises(ModelError, match=r"cannot be read as the state of a policy.*Remove the checkpoint"):
        await made.restore(str(tmp_path))
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelError, match=rf"{tmp_path} cannot be written: .*directory"):
        await made.checkpoint(str(tmp_path))
    await made.checkpoint(str(tmp_path), wait=False)
    await made.checkpoint(str(tmp_path / "elsewhere"))
    await made.written()  # of the last alone


@EACH
@pytest.mark.parametrize("given_up", [False, True])
async def test_a_checkpoint_that_is_written_meanwhile_is_of_its_own_step(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    begun, updated, waited = Event(), Event(), list[bool]()

    def later(*arguments: Any) -> None:
        begun.set()
        waited.append(updated.wait(600))
        write_boxes(*arguments)

    monkeypatch.setattr("meshrl_torch.checkpoint.state.write_boxes", later)
    made, other = (backend(PolicyConfig(model=MODEL, optimizer=QUICK, seed=seed)) for seed in range(2))
    await made.update(rollouts(), ClippedLoss())
    then = (await made.weights()).fingerprint()
    writing = asyncio.create_task(made.checkpoint(str(tmp_path), wait=given_up))
    assert await asyncio.to_thread(begun.wait, 600)
    if given_up:
        writing.cancel()
        Timer(0.2, updated.set).start()
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


@pytest.mark.parametrize("writer", [FsdpPolicy, TorchPolicy])
async def test_a_checkpoint_of_another_backend_is_continued(writer: Backend, tmp_path: Path) -> None:
    made, same, other = (
        policy(backend) for backend in (writer, writer, TorchPolicy if writer is FsdpPolicy else FsdpPolicy)
    )
    await made.update(rollouts(), ClippedLoss())
    await made.checkpoint(str(tmp_path))
    for each in (same, other):
        await each.restore(str(tmp_path))
        assert await each.weights() == await made.weights()
    told = [(await each.update(rollouts(seed=1), ClippedLoss())).means() for each in (made, same, other)]
    assert told[0] == told[1]
    assert told[2] == pytest.approx(told[0], rel=1e-4)
    near(await other.weights(), await made.weights(), 2e-5)


async def test_a_checkpoint_is_read_by_torch_too(tmp_path: Path) -> None:
    made = policy()
    await made.update(rollouts(), ClippedLoss())
    await made.checkpoint(str(tmp_path))
    weights = (await made.weights()).tensors
    taken = {f"model/{name}": torch.zeros(array.shape) for name, array in weights.items()}
    load(taken, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    for name, array in weights.items():
        np.testing.assert_array_equal(taken[f"model/{name}"].numpy(), array)


BACKENDS: Mapping[str, Callable[[PolicyConfig], Policy]] = {
    "torch": TorchPolicy, "fsdp": FsdpPolicy, "megatron": MegatronPolicy,
}  # fmt: skip
READS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"}


class Curious(Counted):
    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> TokenLoss:
        assert logprobs.sum().item() < 0
        return super().__call__(logprobs, columns)


async def reads(backend: str, budget: int, loss: Counted) -> tuple[int, int]:
    table = {"model": MODEL, "backend": backend, "micro_batch_tokens": budget}
    trainer = BACKENDS[backend](PolicyConfig.model_validate(table))
    await trainer.update(rollouts(), ClippedLoss())
    with Watched() as watched:
        await trainer.update(rollouts(seed=1), loss)
    return len(loss._calls), sum(name in READS for name, _ in watched.calls)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_step_waits_as_often_for_many_micro_batches_as_for_one(backend: str) -> None:
    once, often = await reads(backend, 4096, Counted()), await reads(backend, 20, Counted())
    curious = await reads(backend, 20, Curious())
    assert once[0] == 1
    assert often[0] > 3
    assert often[1] == once[1]
    assert curious[1] == often[1] + curious[0], "a look that was planted is found"


LORA = LoraConfig(rank=4, alpha=8)


async def trained(backend: Backend, small: str, lora: LoraConfig = LORA) -> Trained:
    made = policy(backend, model=small, lora=lora)
    for _ in range(3):
        await made.update(rollouts(), ClippedLoss())
    return made


@EACH
async def test_new_adapters_change_nothing(backend: Backend, small: str) -> None:
    plain, adapted = policy(backend, model=small), policy(backend, model=small, lora=LORA)
    assert await plain.logprobs(rollouts()) == await adapted.logprobs(rollouts())
    assert await plain.weights() == await adapted.weights()


@EACH
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
async def test_what_is_saved_opens_in_peft_and_can_be_continued(backend: Backend, small: str, tmp_path: Path) -> None:
    made = await trained(backend, small)
    await made.save(str(tmp_path / "adapters"))
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small), str(tmp_path / "adapters"))
    merged = opened.merge_and_unload().state_dict()
    weights = await made.weights()
    assert "model.layers.0.mlp.up_proj.weight" in weights.tensors
    for name, array in weights.tensors.items():
        np.testing.assert_allclose(floats(array), merged[name].numpy(), atol=1e-6)
    assert weights != (await policy(backend, model=small, lora=LORA).weights()).with_version(weights.version)
    near(weights, await (await trained(TorchPolicy, small)).weights(), 2e-5)
    await made.checkpoint(str(tmp_path / "state"))
    again = policy(backend, model=small, lora=LORA)
    await again.restore(str(tmp_path / "state"))
    told, expected = await updated(again, made)
    assert told == expected
    assert await made.weights() == await again.weights()


@EACH
async def test_adapters_alone_give_the_same_rollouts(backend: Backend, small: str) -> None:
    beside = LORA.model_copy(update={"sync": "adapters"})
    prompts, sampling = Batch.of(prompt=["abc>", "de>"] * 4), Sampling(max_tokens=8)
    drawn, sent = list[Batch](), list[Weights]()
    for lora, own in ((LORA, None), (beside, beside), (beside, None)):
        weights = sent[1] if sent[1:] else await (await trained(backend, small, lora)).weights()
        sampler = TorchSampler(SamplerConfig(model=small, lora=own, seed=3))
        await sampler.load(weights)
        drawn.append(await drawn_by(sampler, prompts, sampling))
        sent.append(weights)
    assert len({each.objects("completion") for each in drawn}) == 1
    assert sent[1].nbytes < sent[0].nbytes / 2
    with pytest.raises(ModelError, match="another model"):
        await TorchSampler(SamplerConfig(model=small, lora=beside)).load(sent[0])


def test_an_algorithm_gives_its_sampler_what_it_needs() -> None:
    class Own(AlgorithmConfig):
        policy: PolicyConfig
        sampler: SamplerConfig

    for sync, filled in (("merged", None), ("adapters", LoraConfig(rank=4, sync="adapters"))):
        table = {"policy": {"model": "folder", "lora": {"rank": 4, "sync": sync}}}
        assert validate(Own, table, "test").sampler.lora == filled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks there
@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(pytest.param(each, marks=pytest.mark.wide) for each in ({"activation_checkpointing": True}, {"lora": LORA})),
    ],
    ids=str,
)
async def test_nothing_compiles_after_the_second_step(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    layers = 9  # more than torch compiles one function for
    counter = CompileCounterWithBackend("aot_eager")  # which compiles to the same operations: without a compiler of C++
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    table = {"model": MODEL.model_copy(update={"layers": layers}), "micro_batch_tokens": 60, **changes}
    plain, compiled = policy(**table), policy(**table, fsdp={"compile": True})
    assert counter.frame_count == 0, "the proof that rows may be packed is not compiled"
    batches = [rollouts(seed=seed) for seed in range(3)]
    assert len({int(batch.tokens.lengths.sum()) for batch in batches}) == 3
    counts: list[int] = []
    for seed, batch in enumerate(batches):
        found, expected = await updated(compiled, plain, seed=seed)
        assert found == pytest.approx(expected, rel=1e-4)
        await compiled.logprobs(batch)
        counts.append(counter.frame_count)
    assert 0 < counts[1] < 2 * layers  # the layers share what is compiled
    assert counts[1] == counts[2]
