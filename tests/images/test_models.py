"""Vision-language models against transformers alone: trainer, sampler, saved folder, adapters, and two ranks."""

from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, LlavaModel
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from meshrl import Batch, ClippedLoss, Policy, PolicyConfig, SamplerConfig, Sampling, Task
from meshrl.data import IMAGES, Images, name_of
from meshrl.errors import ConfigError, DataError, ModelError
from meshrl.mesh import Array, Rank, rank_context
from meshrl.roles import Workload, memory_of
from meshrl_torch.model.chat import words_of
from meshrl_torch.model.vision import Taken
from meshrl_torch.sample.sampler import TorchSampler
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.material import Warm, floats, on_ranks
from tests.images.families import FAMILIES, folder_of, picture

FolderOf = Callable[[str], str]
WIDE = ("qwen3_vl", "gemma3")
TEXT = {"characters": "abcdefghijklmnopqrstuvwxyz ?", "hidden_size": 16, "ffn_size": 16, "layers": 1, "heads": 2}
ROWS: list[dict[str, object]] = [
    {"image": picture(1), "question": "what is it?", "answer": "a"},
    {"image": [picture(2, 40, 24), picture(3)], "question": "which?", "answer": "b"},
    {"image": None, "question": "why?", "answer": "c"},
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    rank_context.set(Rank(threads=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    made: dict[str, str] = {}

    def of(family: str) -> str:
        if family not in made:
            made[family] = folder_of(family, tmp_path_factory.mktemp(family))
        return made[family]

    return of


def prompts() -> Batch:
    rows = Task.of(ROWS, images=["image"]).train
    return rows.assign(groups=np.arange(len(rows))).part(np.arange(len(rows)))


def policy(model: str, **keys: object) -> TorchPolicy:
    return TorchPolicy(PolicyConfig.model_validate({"model": model, "chat": True, "micro_batch_tokens": 300, **keys}))


async def drawn(model: str, rows: Batch | None = None, **keys: Any) -> Batch:
    made = TorchSampler(SamplerConfig.model_validate({"model": model, "chat": True, "slots": 4}))
    sampling = Sampling.model_validate({"n": 2, "max_tokens": 6, **keys})
    parts = [part async for part in made.generate(prompts() if rows is None else rows, sampling)]
    whole = Batch.join(parts)
    return whole.assign(advantages=np.linspace(-1, 1, len(whole), dtype=np.float32))


def alone(folder: str, row: Mapping[str, object]) -> dict[str, Tensor]:
    """What transformers' own processor makes of a row's prompt."""
    kind: Any = PROCESSOR_MAPPING[type(AutoModelForImageTextToText.from_pretrained(folder).config)]
    # No torchvision is installed, and without it transformers reads no processor that also reads videos.
    bare: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    words = AutoTokenizer.from_pretrained(folder)
    parts = {"tokenizer": words, "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil")}
    processor = bare.from_args_and_dict(
        [parts.get(name) for name in kind.get_attributes()], kind.get_processor_dict(folder)[0]
    )
    given: Any = row["image"]
    files = given if isinstance(given, list) else [given] if given else []
    content: Any = [*({"type": "image"} for _ in files), {"type": "text", "text": row["question"]}]
    text = words.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    images = {"images": [Image.open(BytesIO(file)) for file in files]} if files else {}
    made = processor(text=[text], **images, return_tensors="pt", add_special_tokens=False)
    return {name: each for name, each in made.items() if name != "attention_mask"}


def told(network: Any, inputs: Mapping[str, Tensor], said: Tensor) -> Tensor:
    """The log-probs that a model by itself gives to a completion."""
    given = dict(inputs)
    for name, each in inputs.items():
        if name == "input_ids" or name.endswith("type_ids"):
            more = said if name == "input_ids" else torch.zeros_like(said)
            given[name] = torch.cat([each, more[None]], 1)
    logits = network(**given, use_cache=False).logits[0].float()
    logprobs: Tensor = logits.log_softmax(-1)[-len(said) - 1 : -1].gather(1, said[:, None])[:, 0]
    return logprobs


@pytest.mark.parametrize("family", FAMILIES)
async def test_trainer_and_sampler_are_transformers_alone(family: str, folder: FolderOf, tmp_path: Path) -> None:
    model, batch = folder(family), await drawn(folder(family))
    trainer = policy(model)
    scored = await trainer.logprobs(batch)
    network = AutoModelForImageTextToText.from_pretrained(model, attn_implementation="eager").eval()
    inputs = [alone(model, row) for row in ROWS]
    for number, (tokens, mask) in enumerate(zip(batch.tokens, batch.loss_mask, strict=True)):
        own, learns = inputs[int(batch.groups[number])], np.asarray(mask, np.bool_)
        assert tokens[~learns].tolist() == own["input_ids"][0].tolist()
        with torch.no_grad():
            wanted = told(network, own, torch.from_numpy(tokens[learns].astype(np.int64))).numpy()
        for found in (scored.ragged("logprobs"), batch.sampler_logprobs):
            np.testing.assert_allclose(floats(found[number])[learns], wanted, atol=1e-5)
    with torch.no_grad():
        said = inputs[0]["input_ids"][0, -2:]
        blind, seen = (told(network, given, said) for given in (_blind(inputs[0]), inputs[0]))
    assert float((blind - seen).abs().max()) > 1e-3, "the image makes no difference"

    encoded = await trainer.encode(prompts().assign(completion=["yes", "no", "so"]))
    assert [
        ids[: int(mask.argmax())].tolist() for ids, mask in zip(encoded.tokens, encoded.loss_mask, strict=True)
    ] == [own["input_ids"][0].tolist() for own in inputs]

    before, _ = await tensors(trainer), await trainer.update(batch, ClippedLoss())
    changed = {name for name, each in (await tensors(trainer)).items() if not np.array_equal(each, before[name])}
    assert changed
    assert not [name for name in changed if "vis" in name or "project" in name or "connector" in name]
    await trainer.save(str(tmp_path / "saved"))
    again = await policy(str(tmp_path / "saved")).logprobs(batch)
    np.testing.assert_allclose(values(again), values(await trainer.logprobs(batch)), atol=1e-6)


def _blind(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"input_ids": inputs["input_ids"]}


async def tensors(trainer: Policy) -> Mapping[str, Array]:
    return {name: each.copy() for name, each in (await trainer.weights()).tensors.items()}


def values(batch: Batch) -> NDArray[np.float32]:
    return floats(batch.ragged("logprobs").values)


def images(batch: Batch) -> Images:
    return cast("Images", batch[IMAGES])


async def test_adapters_are_of_the_language_model_and_peft_reads_them(folder: FolderOf, tmp_path: Path) -> None:
    model, batch = folder("gemma3"), await drawn(folder("gemma3"))
    trainer = policy(model, lora={"rank": 2, "targets": ["q_proj"]}, optimizer={"lr": 0.1})
    await trainer.update(batch, ClippedLoss())
    await trainer.save(str(tmp_path / "adapters"))
    found, plain = [values(await policy(each).logprobs(batch)) for each in (str(tmp_path / "adapters"), model)]
    wanted = values(await trainer.logprobs(batch))
    assert float(np.abs(wanted - plain).max()) > 1e-3
    np.testing.assert_allclose(found, wanted, atol=1e-4)


async def test_what_sees_is_trained_if_asked_for(folder: FolderOf) -> None:
    model, batch = folder("llava"), await drawn(folder("llava"))
    keys = {"model": model, "chat": True, "train_vision": True}
    trainer, sharded = (each(PolicyConfig.model_validate(keys)) for each in (TorchPolicy, FsdpPolicy))
    before = await tensors(trainer)
    one, other = [await each.update(batch, ClippedLoss()) for each in (trainer, sharded)]
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    after = await tensors(trainer)
    assert [name for name in before if "vision_tower" in name and not np.array_equal(before[name], after[name])]
    with pytest.raises(ConfigError, match=r"policy\.train_vision: this model sees no images"):
        TorchPolicy(PolicyConfig.model_validate({"model": TEXT, "train_vision": True}))


async def test_an_image_is_looked_at_once_a_pass(folder: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, trainer, looked = await drawn(folder("llava"), n=4), policy(folder("llava")), list[int]()
    look = LlavaModel.get_image_features

    def told_of(self: LlavaModel, pixel_values: Tensor, **more: Any) -> Any:
        looked.append(len(pixel_values))
        return look(self, pixel_values=pixel_values, **more)

    monkeypatch.setattr(LlavaModel, "get_image_features", told_of)
    await trainer.logprobs(batch.select([0, 1, 2, 3]))
    assert looked == [1]


class Plain(nn.Module):
    """A body that gives arguments without names to what sees, if it has that."""

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        return cast("Tensor", cast("Any", self).get_image_features(pixel_values, 2.0).pooler_output)


class Looking(Plain):
    def get_image_features(self, pixel_values: Tensor, scale: float = 1.0) -> Any:
        return SimpleNamespace(pooler_output=pixel_values * scale)


def test_bodies_of_other_forms_look_at_images_too(folder: FolderOf) -> None:
    vision = words_of(PolicyConfig(model=folder("llava"), chat=True)).vision
    assert vision is not None
    files = {name_of(picture(seed)): picture(seed) for seed in (1, 2)}
    one, other = files
    ids, names = np.zeros((3, 4), np.int64), [(one, "row 0"), (other, "row 1"), (one, "row 2")]
    taken = [
        vision.taken(body, ids, np.full(3, 4), Images([[name] for name, _ in names], files), names)
        for body in (Looking(), Plain())
    ]
    once, each = [made.inputs["pixel_values"] for made in taken if made]
    assert torch.equal(once[[0, 1, 0]], each)
    pixels = torch.randn(2, 8)
    made = Taken({"input_ids": torch.zeros(1), "pixel_values": pixels}, {"pixel_values": pixels}, [1, 1], [0, 1, 0])
    assert torch.equal(made.read(Looking())[0], 2 * pixels[[0, 1, 0]])


@pytest.mark.parametrize("family", ["llava", *(pytest.param(each, marks=pytest.mark.wide) for each in WIDE)])
def test_memory_has_what_a_tower_keeps(family: str, folder: FolderOf) -> None:
    keys = {"model": folder(family), "chat": True, "train_vision": True, "micro_batch_tokens": 400}
    work = Workload({"dp": 1}, prompt=40, completion=8, rows=32, n=4, gpu=0)
    terms = [memory_of(PolicyConfig.model_validate(each), work) for each in (keys, keys | {"train_vision": False})]
    trained, frozen = [{term.name: term.nbytes for term in each.terms}["images"] for each in terms if each]
    network = AutoModelForImageTextToText.from_pretrained(folder(family))
    weights, kept = {each.data_ptr() for each in network.parameters()}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    image = Image.new("RGB", (256, 256), "white")
    made = AutoImageProcessor.from_pretrained(folder(family), backend="pil")(images=[image], return_tensors="pt")
    inputs = {name: each for name, each in made.items() if name in ("pixel_values", "image_grid_thw")}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        seen = cast("Any", network.base_model).get_image_features(**inputs)
    own = 8 * sum(size for at, size in kept.items() if at not in weights)  # a micro-batch may have a row of each prompt
    assert own <= trained <= 2 * own
    assert frozen < trained
    assert seen is not None


@on_ranks
async def test_a_rank_without_images_keeps_in_step(folder: FolderOf, warm: Warm) -> None:
    model, batch = folder("qwen3_vl"), (await drawn(folder("qwen3_vl"))).select([0, 4, 5])
    config = PolicyConfig.model_validate({"model": model, "chat": True, "train_vision": True})
    found: list[tuple[float, NDArray[np.float32]]] = []
    for made in (TorchPolicy(config), await (await warm(2)).spawn(FsdpPolicy, config)):
        metrics = await made.update(batch, ClippedLoss())
        found.append((metrics["grad_norm"], values(await (await made.logprobs(batch)).load())))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-4)


async def test_rows_that_do_not_fit_are_refused(folder: FolderOf) -> None:
    model = folder("qwen2_5_vl")
    batch, trainer = await drawn(model), policy(model)
    shifted = batch.assign(images=Images([(), *images(batch)[:-1]], images(batch).pool))
    with pytest.raises(DataError, match="has 6 tokens of images, and this model's processor makes 0 of its 0 images"):
        await trainer.logprobs(shifted)
    with pytest.raises(DataError, match=r"the sampler's processor made .* and this role's makes"):
        await trainer.logprobs(batch.assign(image_fingerprints=[("a",) * len(own) for own in images(batch)]))
    with pytest.raises(DataError, match="it stands for one"):
        await drawn(model, Batch.of(prompt=["<|image_pad|>"], groups=np.zeros(1, np.int64)))
    with pytest.raises(DataError, match="does not have"):
        await drawn(model, prompts().drop(IMAGES))
    with pytest.raises(ModelError, match="packed rows are proved for texts alone"):
        policy(model, packing="packed")
    text = TorchPolicy(PolicyConfig.model_validate({"model": TEXT}))
    with pytest.raises(DataError, match="sees none"):
        await text.encode(prompts().assign(completion=["a"] * 3))
