"""Adapters with names on one base: each learns and answers as peft does with that one alone, whatever the others do."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig

from meshrl import Batch, PolicyConfig, Ragged, Sampling, publish
from meshrl.algo import ClippedLoss, CrossEntropy
from meshrl.data import Source
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl.roles import LoraConfig, OptimizerConfig, SamplerConfig, Step
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.material import SGD, SHAPE, by_row

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # what peft tells its callers
SHAPES: dict[str, Any] = {"llama": LlamaConfig(**SHAPE)}
TABLES: Mapping[str, LoraConfig] = {
    "a": LoraConfig(rank=4, alpha=8, sync="adapters"),
    "b": LoraConfig(
        rank=2, alpha=6, targets=("q_proj", "embed_tokens"), seed=5, sync="adapters", optimizer=OptimizerConfig(lr=0.3)
    ),
}


def rows(*names: str | None) -> Batch:
    """A row for each adapter, of 5 to 12 tokens. The last three quarters are learned."""
    random = np.random.default_rng(len(names))
    tokens = [random.integers(2, 11, random.integers(5, 13)) for _ in names]
    masks = [np.arange(len(row)) > len(row) // 4 for row in tokens]
    batch = Batch.of(tokens=Ragged.of(tokens, np.int32), loss_mask=Ragged.of(masks, np.bool_))
    return batch.assign(adapter=list(names))


def of(batch: Batch, name: str) -> Batch:
    """The rows of an adapter, without its name."""
    return batch.select([row for row, own in enumerate(batch.objects("adapter")) if own == name]).drop("adapter")


def policy(folder: str, **keys: object) -> TorchPolicy:
    table = {"model": folder, "optimizer": {"lr": 0.05}, "micro_batch_tokens": 24, "adapters": TABLES, **keys}
    return TorchPolicy(PolicyConfig.model_validate(table))


async def tensors(made: TorchPolicy, adapter: str | None) -> Mapping[str, np.ndarray[Any, Any]]:
    return {name: array.copy() for name, array in (await made.weights(adapter)).tensors.items()}


BOTH = rows("a", "b", "b", "a", "a", "b", "a")


@pytest.mark.parametrize("shared", [True, False])
async def test_each_learns_what_peft_learns_with_it_alone(model: Callable[[str], str], shared: bool) -> None:
    """One step of each by the rows of both, against peft and AdamW in float64."""
    near_gradient = SGD.model_copy(update={"lr": 0.3})
    tables = {name: table.model_copy(update={"optimizer": near_gradient}) for name, table in TABLES.items()}
    made = policy(model("llama"), adapters=tables, share_passes=shared)
    before = {name: await tensors(made, name) for name in tables}
    await made.update(BOTH, CrossEntropy())
    for name, table in tables.items():
        targets = list(table.targets) or "all-linear"
        alone = PeftConfig(r=table.rank, lora_alpha=table.alpha, target_modules=targets, task_type="CAUSAL_LM")
        network: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model("llama"), dtype=torch.float64), alone)
        trained = {each: own for each, own in network.base_model.model.named_parameters() if own.requires_grad}
        assert trained.keys() == before[name].keys()
        for each, own in trained.items():
            own.data = torch.from_numpy(before[name][each]).double()
        batch = of(BOTH, name)
        learned = torch.from_numpy(batch.loss_mask.values.copy())
        (-torch.cat(by_row(network.base_model.model, batch))[learned].mean()).backward()
        torch.optim.AdamW(trained.values(), lr=0.3, eps=SGD.eps, weight_decay=0.0).step()
        for each, array in (await tensors(made, name)).items():
            np.testing.assert_allclose(array, trained[each].detach().numpy(), atol=1e-6)
        assert any(
            np.abs(array - before[name][each]).max() > 1e-3 for each, array in (await tensors(made, name)).items()
        )


async def test_adapters_of_very_different_ranks_share_passes(model: Callable[[str], str]) -> None:
    near_gradient = SGD.model_copy(update={"lr": 0.3})
    ranks = {"a": 12, "b": 1, "c": 2, "d": 1}
    tables = {name: LoraConfig(rank=rank, sync="adapters", optimizer=near_gradient) for name, rank in ranks.items()}
    both = [policy(model("llama"), adapters=tables, share_passes=shared) for shared in (True, False)]
    for made in both:
        for _ in range(2):
            await made.update(rows("a", "b", "c", "d", "c", "a"), CrossEntropy())
    for name in tables:
        shared, apart = [await tensors(made, name) for made in both]
        for each, array in shared.items():
            np.testing.assert_allclose(array, apart[each], rtol=1e-4, atol=1e-6)


async def test_passes_of_one_adapter_give_the_bits_that_it_has_alone(model: Callable[[str], str]) -> None:
    """Also if one accumulates while the other steps, with values of its own."""
    together = policy(model("llama"))
    alone = {name: policy(model("llama"), adapters=None, lora=table) for name, table in TABLES.items()}
    more = rows("b", "a", "b")
    await together.forward_backward(BOTH, CrossEntropy())
    await together.step(Step(lr=0.1), adapter="b")
    result = await together.forward_backward(more, CrossEntropy())
    metrics = [await together.step(adapter=name) for name in TABLES]
    await alone["b"].forward_backward(of(BOTH, "b"), CrossEntropy())
    await alone["b"].step(Step(lr=0.1))
    found = await alone["b"].forward_backward(of(more, "b"), CrossEntropy())
    assert result.rows.select([0, 2]).ragged("logprobs") == found.rows.ragged("logprobs")
    for batch in (BOTH, more):
        await alone["a"].forward_backward(of(batch, "a"), CrossEntropy())
    for (name, one), expected in zip(alone.items(), metrics, strict=True):
        assert await one.step() == expected
        assert (await together.weights(name)).fingerprint() == (await one.weights()).fingerprint()
    assert await together.adapters() == {"a": 1, "b": 2}
    assert (await together.logprobs(more)).source("logprobs") == Source("trainer", 1, 2)


async def test_rows_of_an_adapter_keep_the_logprobs_of_a_batch_with_a_newer_one(model: Callable[[str], str]) -> None:
    """A batch has one range of versions for all its rows, which a selection of them keeps."""
    made = policy(model("llama"))
    await made.update(of(BOTH, "a").assign(adapter=["a"] * 4), CrossEntropy())
    scored = await made.logprobs(BOTH)
    assert scored.source("logprobs") == Source("trainer", 0, 1)
    older = scored.select([row for row, own in enumerate(scored.objects("adapter")) if own == "b"])
    drawn = Ragged(older.ragged("logprobs").values, older.tokens.offsets, source=Source("sampler"))
    own = older.assign(advantages=np.ones(len(older), np.float32), sampler_logprobs=drawn)
    await made.update(own, ClippedLoss(anchor="trainer"))
    assert await made.adapters() == {"a": 1, "b": 1}
    await made.update(of(BOTH, "b").assign(adapter=["b"] * 3), CrossEntropy())
    empty = made._trainable.source(BOTH.select([]))  # what a rank without rows says of a batch
    assert empty == Source("trainer", 1, 2)


async def drawn(sampler: TorchSampler, prompts: Batch, **keys: Any) -> Batch:
    parts = [part async for part in sampler.generate(prompts, Sampling(max_tokens=6, temperature=0, **keys))]
    return Batch.join([part.part(np.arange(len(part))) for part in parts]) if len(parts) > 1 else parts[0]


async def trained(folder: str) -> TorchPolicy:
    made = policy(folder)
    for _ in range(2):
        await made.update(BOTH, CrossEntropy())
    return made


async def test_rows_of_many_adapters_are_decoded_together_as_peft_decodes_each(
    model: Callable[[str], str], tmp_path: Path
) -> None:
    made, sampler = await trained(model("llama")), TorchSampler(SamplerConfig(model=model("llama")))
    await made.save(str(tmp_path / "saved"))
    whole = (await sampler_weights(made)).nbytes
    for name in TABLES:
        sent = await publish(made, sampler, adapter=name)
        assert sent.adapter is not None
        assert sent.adapter.name == name
        assert sent.nbytes < whole / 3
    names: list[str | None] = ["a", "", "b", "a", "b", None]
    texts = ["abc", "abc", "abc", "de", "de", "de"]
    found = await drawn(sampler, Batch.of(prompt=texts, adapter=names, number=np.arange(6)))
    found = found.select(np.argsort(found.row("number")))
    for row, (named, tokens, own) in enumerate(zip(names, found.tokens, found.loss_mask, strict=True)):
        mask = np.asarray(own, np.bool_)
        network: Any = AutoModelForCausalLM.from_pretrained(model("llama"))
        if named:
            network = PeftModel.from_pretrained(network, str(tmp_path / "saved" / named))
        prompt = torch.from_numpy(tokens[~mask].astype(np.int64))[None]
        wanted = network.eval().generate(input_ids=prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert tokens.tolist() == wanted[0].tolist()
        assert set(found.versions[row][mask].tolist()) == {2 if named else 0}
    assert len({tuple(tokens) for tokens in list(found.tokens)[:3]}) == 3


async def sampler_weights(made: TorchPolicy) -> Any:
    return await made.weights()  # of the base, because no adapter is called "default"


async def test_a_version_that_has_a_name_stays_for_its_rows_while_the_adapter_changes(
    model: Callable[[str], str],
) -> None:
    made, sampler = await trained(model("llama")), TorchSampler(SamplerConfig(model=model("llama")))
    await publish(made, sampler, adapter="a")
    await publish(made, sampler, adapter="a", name="a@2")
    prompts = Batch.of(prompt=["abc", "de"] * 2, adapter=["a", "a", "a@2", "a@2"])
    stream = sampler.generate(prompts.select([0]), Sampling(max_tokens=20, ignore_eos=True, temperature=0))
    old = await drawn(sampler, prompts.select([2, 3]))
    begun = anext(stream)
    for _ in range(3):
        await made.update(of(BOTH, "a").assign(adapter=["a"] * 4), CrossEntropy())
    await publish(made, sampler, adapter="a")
    assert (await begun).versions.values.max() == 5
    assert (await drawn(sampler, prompts.select([2, 3]))).tokens == old.tokens
    assert set((await drawn(sampler, prompts)).row("oldest_version").tolist()) == {2, 5}
    await sampler.drop_adapter("a@2")
    with pytest.raises(DataError, match="row 2 names the adapter 'a@2', and this model has 'a'"):
        await drawn(sampler, prompts)


async def test_a_fresh_policy_goes_on_from_the_checkpoint_of_all(model: Callable[[str], str], tmp_path: Path) -> None:
    made = policy(model("llama"), lora={"rank": 2, "targets": ["v_proj"]})
    await made.add_adapter("late", TABLES["b"])
    batch = rows("late", None, "a", None, "default")
    await made.update(batch, CrossEntropy())
    await made.checkpoint(str(tmp_path / "all"))
    fresh = policy(model("llama"), lora={"rank": 2, "targets": ["v_proj"]})
    await fresh.add_adapter("gone", TABLES["a"])
    await fresh.restore(str(tmp_path / "all"))
    assert await fresh.adapters() == await made.adapters() == {"default": 1, "a": 1, "b": 0, "late": 1}
    assert await fresh.update(batch, CrossEntropy()) == await made.update(batch, CrossEntropy())
    for name in (None, "a", "b", "late"):
        assert await fresh.weights(name) == await made.weights(name)


async def test_a_state_may_lack_declared_adapters_or_have_none(model: Callable[[str], str], tmp_path: Path) -> None:
    made, none = policy(model("llama")), policy(model("llama"), adapters={})
    await made.drop_adapter("b")
    await made.update(of(BOTH, "a").assign(adapter=["a"] * 4), CrossEntropy())
    await made.checkpoint(str(tmp_path / "one"))
    fresh = policy(model("llama"))
    untouched = await fresh.weights("b")
    await fresh.update(BOTH, CrossEntropy())
    await fresh.restore(str(tmp_path / "one"))
    assert await fresh.adapters() == {"a": 1, "b": 0}
    assert await fresh.weights("a") == await made.weights("a")
    assert await fresh.weights("b") == untouched
    await none.checkpoint(str(tmp_path / "none"))
    await none.add_adapter("x", TABLES["a"])
    await none.restore(str(tmp_path / "none"))
    assert await none.adapters() == {}


async def test_a_restore_of_what_does_not_fit_changes_nothing(model: Callable[[str], str], tmp_path: Path) -> None:
    """A folder of nothing, of one adapter alone, of other adapters, and of the same tensors with another scale."""
    made, other = policy(model("llama"), adapters={}), policy(model("llama"), adapters={})
    await made.add_adapter("x", TABLES["a"])
    await other.add_adapter("first", TABLES["b"])
    await other.add_adapter("x", TABLES["a"].model_copy(update={"alpha": 64}))
    await made.update(of(BOTH, "a").assign(adapter=["x"] * 4), CrossEntropy())
    before = await made.weights("x")
    await other.checkpoint(str(tmp_path / "all"))
    await other.checkpoint(str(tmp_path / "x"), adapter="x")
    for folder, name, message in (
        ("nothing", None, r"nothing is not the state of a policy with adapters, because it has no adapters\.json"),
        ("x", None, r"x is not the state of a policy with adapters"),
        ("x", "x", "its adapter has alpha = 64, and here it has alpha = 8"),
        ("all", None, "its adapter has alpha = 64, and here it has alpha = 8"),
    ):
        with pytest.raises(ModelError, match=message):
            await made.restore(str(tmp_path / folder), adapter=name)
        assert await made.adapters() == {"x": 1}
        assert await made.weights("x") == before


async def test_a_sampler_refuses_an_adapter_of_another_scale(model: Callable[[str], str]) -> None:
    made = policy(model("llama"))
    table = SamplerConfig(model=model("llama"), adapters={"a": TABLES["a"].model_copy(update={"alpha": 64})})
    with pytest.raises(ModelError, match="'a' has rank = 4 and alpha = 8, and this sampler's has 4 and 64"):
        await publish(made, TorchSampler(table), adapter="a")


async def test_a_save_deletes_no_adapter_that_it_does_not_write(model: Callable[[str], str], tmp_path: Path) -> None:
    made = policy(model("llama"))
    both, mixed = tmp_path / "both", tmp_path / "mixed"
    for _ in range(2):
        await made.save(str(both))  # the same adapters are replaced
    await made.save(str(mixed / "a"), adapter="a")
    await made.save(str(tmp_path / "runs" / "earlier"), adapter="a")
    (mixed / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="adapters that this save would delete and not write, in a, b"):
        await made.save(str(both), adapter="a")
    with pytest.raises(ModelError, match="adapters that this save would delete and not write, in earlier"):
        await made.save(str(tmp_path / "runs"))
    with pytest.raises(ModelError, match="it has other files"):
        await made.save(str(mixed))
    assert (mixed / "notes.txt").read_text() == "mine"
    assert {each.name for each in both.iterdir()} >= {"a", "b"}


def test_no_step_may_make_weights_that_are_not_finite() -> None:
    for table in ({"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"lr": np.inf}, {"eps": np.inf}):
        for kind in (Step, OptimizerConfig):
            with pytest.raises(ValidationError):
                kind.model_validate(table)
    assert Step(max_grad_norm=np.inf).max_grad_norm == np.inf


async def test_what_cannot_be_is_refused_by_name(model: Callable[[str], str], tmp_path: Path) -> None:
    made, whole = policy(model("llama")), policy(model("llama"), adapters=None)
    with pytest.raises(DataError, match="row 1 names the adapter 'c', and this model has 'a', 'b'"):
        await made.update(rows("a", "c"), CrossEntropy())
    with pytest.raises(DataError, match="row 1 names no adapter, and the base model is frozen"):
        await made.forward_backward(rows("a", None), CrossEntropy())
    of_a = np.repeat([own == "a" for own in BOTH.objects("adapter")], BOTH.lengths)
    masked = Ragged(BOTH.loss_mask.values & of_a, BOTH.tokens.offsets)
    with pytest.raises(DataError, match="nothing to learn for the adapter 'b'"):
        await made.update(BOTH.assign(loss_mask=masked), CrossEntropy())
    with pytest.raises(DataError, match="no adapter 'c': it has 'a', 'b'"):
        await made.step(adapter="c")
    with pytest.raises(ConfigError, match="there is an adapter 'a' already"):
        await made.add_adapter("a", TABLES["b"])
    with pytest.raises(ConfigError, match=r"'\.\./a' is no name of an adapter"):
        await made.add_adapter("../a", TABLES["b"])
    with pytest.raises(ConfigError, match="trains its whole model, so it can have no adapter 'a'"):
        await whole.add_adapter("a", TABLES["a"])
    await made.forward_backward(of(BOTH, "a").assign(adapter=["a"] * 4), CrossEntropy())
    with pytest.raises(DataError, match="rows wait for a step"):
        await made.checkpoint(str(tmp_path / "all"))
    await made.checkpoint(str(tmp_path / "b"), adapter="b")
    with pytest.raises(ModelError, match="the state of another policy"):
        await made.restore(str(tmp_path / "b"), adapter="a")
