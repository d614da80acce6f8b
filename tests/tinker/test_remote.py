"""Policies and samplers at a server for scripts of ours: a page makes the steps that it makes alone, and mistakes."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import meshrl as rl
from meshrl.algo import CrossEntropy
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl.remote import Call, Packed
from meshrl.remote.messages import Named
from tests.algorithms.pages import run_page
from tests.algorithms.test_on_torch import MODEL, letter_b
from tests.tinker.served import served

LORA = {"rank": 4, "alpha": 8}


def configured(folder: Path, **policy: Any) -> dict[str, Any]:
    return {
        "policy": {"model": MODEL, "optimizer": {"lr": 0.02}, **policy},
        "sampler": {"model": MODEL},
        "tinker": {"port": 0, "folder": str(folder / "state"), "model": "tiny", "state_every": 2},
        "run": {"name": "tinker", "folder": str(folder / "runs"), "meshes": {"main": {"cpus": 1}}},
    }


@pytest.mark.parametrize("adapter", [{}, {"lora": LORA}], ids=["whole", "adapter"])
async def test_a_page_makes_the_same_steps_against_a_server(tmp_path: Path, adapter: dict[str, Any]) -> None:
    table: dict[str, Any] = {
        **letter_b(tmp_path),
        "steps": 4,
        "prompts": 8,
        "sampling": {"n": 4, "max_tokens": 4},
        "minibatches": 2,
    }
    if adapter:
        table["policy"] = table["policy"] | {"lora": LORA | {"sync": "adapters"}}
    table["evaluation"] = {"every": 2, "rows": 4}
    table["task"] = table["task"] | {"held_out": 4}
    alone = await run_page("grpo", tmp_path / "alone", table)
    with served(configured(tmp_path, **adapter)) as url:
        far = await run_page("grpo", tmp_path / "far", table, server=url)
    names = ("reward", "loss", "grad_norm", "lr", "clip_fraction", "rows", "tokens")
    assert [[step[name] for name in names] for step in far.steps] == [
        [step[name] for name in names] for step in alone.steps
    ]
    files = [next((folder / "model").glob("*.safetensors")) for folder in (alone.folder, far.folder)]
    (mine, wanted) = (load_file(file) for file in files)
    assert mine.keys() == wanted.keys()
    assert all(np.array_equal(mine[name], wanted[name]) for name in mine)


def rows() -> rl.Batch:
    tokens = np.random.default_rng(0).integers(0, 5, (4, 8)).astype(np.int32)
    masks = [np.arange(8) > 2] * 4
    return rl.Batch.of(tokens=rl.Ragged.of(list(tokens), np.int32), loss_mask=rl.Ragged.of(masks, np.bool_))


def floats(column: rl.Ragged) -> NDArray[np.float64]:
    return np.asarray(column.values, np.float64)


def packed(model: str, number: int, **keys: Any) -> bytes:
    return msgspec.msgpack.encode(Call(model, number, **keys))


async def test_a_call_that_comes_again_is_made_once_and_halves_are_a_whole(tmp_path: Path) -> None:
    with served(configured(tmp_path)) as url:
        async with rl.connect(url) as server:
            base, first, whole = [await server.policy() for _ in range(3)]
            call = {"verb": "update", "batch": Packed.of(rows()), "loss": Named.of(CrossEntropy())}
            made = await server.client.result("meshrl/call", packed(first.model, 1, **call))
            assert await server.client.result("meshrl/call", packed(first.model, 1, **call)) == made
            with pytest.raises(DataError, match="came before with other content"):
                await server.client.result("meshrl/call", packed(first.model, 1, **call, step={"lr": 1.0}))

            seen = (await whole.forward_backward(rows(), CrossEntropy())).rows.ragged("logprobs")
            assert (await whole.step()).means() == made.metrics.means()
            wanted = floats((await base.logprobs(rows())).ragged("logprobs")) * floats(rows().loss_mask)
            np.testing.assert_allclose(floats(seen), wanted, atol=1e-6)

            sampler = server.sampler()
            assert (await rl.publish(whole, sampler)).version == 1
            drawn = await rl.rollout(
                sampler, rl.Batch.of(prompt=["ab>"], row=[{"any": 1}]), rl.Sampling(n=2, max_tokens=4)
            )
            assert drawn.objects("row") == ({"any": 1}, {"any": 1})
            assert set(drawn.versions.values.tolist()) == {-1, 1}

            kept = str(tmp_path / "kept")
            await whole.checkpoint(kept)
            before = (await whole.logprobs(rows())).ragged("logprobs")
            await whole.update(rows(), CrossEntropy())
            assert (await whole.logprobs(rows())).ragged("logprobs") != before
            await whole.restore(kept)
            assert (await whole.logprobs(rows())).ragged("logprobs") == before


async def test_rows_have_the_version_that_was_published_even_if_a_step_changed_nothing(tmp_path: Path) -> None:
    with served(configured(tmp_path, lora=LORA)) as url:
        async with rl.connect(url) as server:
            policy, sampler = await server.policy(), server.sampler()
            for version in range(2):
                assert (await rl.publish(policy, sampler)).version == version
                drawn = await rl.rollout(sampler, rl.Batch.of(prompt=["ab>"]), rl.Sampling(n=2, max_tokens=4))
                assert set(drawn.versions.values.tolist()) == {-1, version}
                await policy.forward_backward(rows(), CrossEntropy())
                await policy.step(rl.Step(lr=0.0))
            await policy.save(str(tmp_path / "saved"))
            assert (tmp_path / "saved/adapter_model.safetensors").is_file()
            kept = str(await server.client.json(f"training_runs/{policy.model}/checkpoints"))
            assert "sampler_weights" in kept
            assert "external_weights" not in kept


async def test_mistakes_are_told(tmp_path: Path) -> None:
    class Mine(CrossEntropy):
        pass

    with pytest.raises(ConfigError, match="is not the address"):
        async with rl.connect("localhost:8000"):
            pass
    with served(configured(tmp_path)) as url:
        async with rl.connect(url) as server:
            policy, sampler = await server.policy(), server.sampler()
            with pytest.raises(DataError, match=r"losses of meshrl\.algo alone, and Mine is none"):
                await policy.update(rows(), Mine())
            with pytest.raises(ModelError, match="not of a policy at this server"):
                await sampler.load(rl.Weights(1, {"a": np.zeros(2, np.float32)}))
            strange = {"verb": "update", "batch": Packed.of(rows()), "loss": Named("Nothing", {})}
            cut = {"verb": "logprobs", "batch": Packed(b"nothing", [])}
            for number, (keys, complaint) in enumerate(((strange, "no loss 'Nothing'"), (cut, "not a batch")), 1):
                with pytest.raises(DataError, match=complaint):
                    await server.client.result("meshrl/call", packed(policy.model, number, **keys))
            with pytest.raises(DataError, match="is not a Call"):
                await server.client.ask("/api/v1/meshrl/call", b"\x01", "application/msgpack")
            await sampler.load(rl.Weights(1, {"tinker://nobody/sampler_weights/x": np.zeros(0, np.float32)}))
            with pytest.raises(DataError, match="there is no checkpoint"):
                await rl.rollout(sampler, rl.Batch.of(prompt=["ab>"]), rl.Sampling(max_tokens=2))
