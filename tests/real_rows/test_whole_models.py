"""A model is what was read, whole, or an error that names the tensor: on torch, FSDP and Megatron alike."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from meshrl import Batch, CrossEntropy, PolicyConfig, Ragged
from meshrl.errors import ModelError
from meshrl.roles import ModelConfig
from meshrl_torch.checkpoint.boxes import Box
from meshrl_torch.model.loading import load, outline, plain_folder
from meshrl_torch.model.text import character_tokenizer
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.material import floats

Tensors = dict[str, Tensor]
SHAPE: dict[str, Any] = {
    "vocab_size": 11, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 48, "bos_token_id": None, "eos_token_id": 1, "head_dim": 12,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE: dict[str, Any] = {**SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
IDS = torch.tensor([[5, 3, 8, 2, 9, 4, 7]])
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}


def logprobs(network: Any) -> Tensor:
    with torch.no_grad():
        found = network.eval().float()(input_ids=IDS).logits.log_softmax(-1)
    own: Tensor = found[:, :-1].gather(2, IDS[:, 1:, None])[..., 0]
    return own


def write(folder: Path, tensors: Tensors, config: dict[str, Any], **keys: Any) -> str:
    folder.mkdir(exist_ok=True)
    whole = {name: each.contiguous() for name, each in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    character_tokenizer("abcdefgh>", 48).save_pretrained(folder)
    return str(folder)


def written(network: Any, folder: Path) -> tuple[Tensors, dict[str, Any]]:
    network.save_pretrained(folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.fixture(params=[LlamaConfig(**SHAPE), Qwen3MoeConfig(**MIXTURE)], ids=["llama", "experts"])
def original(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tensors, dict[str, Any]]:
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(request.param)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return written(network, tmp_path / "original")


def rounded(tensors: Tensors, block: Callable[[int, int], tuple[int, int]], end: str, scale: torch.dtype) -> Any:
    """Return the tensors with matrices in FP8, and by a loop over blocks, the numbers that they stand for."""
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name], meant[name] = tensor.bfloat16(), tensor.bfloat16().float()
            continue
        rows, columns = block(*tensor.shape)
        form = torch.float32 if scale == torch.uint8 else scale  # of exponents
        scales = torch.zeros(-(-len(tensor) // rows), -(-tensor.shape[1] // columns), dtype=form)
        stored[name], meant[name] = torch.zeros(tensor.shape, dtype=torch.float8_e4m3fn), torch.zeros(tensor.shape)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                own = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                power = 2.0 ** torch.log2(tensor[own].abs().max() / 448).ceil()
                scales[i, j] = power * (1 if scale.itemsize == 1 else 0.9)
                stored[name][own] = (tensor[own] / scales[i, j].float()).to(torch.float8_e4m3fn)
                meant[name][own] = stored[name][own].float() * scales[i, j].float()
        if scale == torch.uint8:
            scales = (torch.log2(scales) + 127).to(torch.uint8)
        stored[name.removesuffix("weight") + end] = scales if scales.numel() > 1 else scales.reshape(())
    return stored, meant


def by_transformers(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Tensor:
    return logprobs(AutoModelForCausalLM.from_pretrained(write(folder, tensors, config), dtype=torch.float32))


def blocks(*_: int) -> tuple[int, int]:
    return 32, 16


def rows(_: int, columns: int) -> tuple[int, int]:
    return 1, columns


def groups(*_: int) -> tuple[int, int]:
    return 1, 32


def matrix(*size: int) -> tuple[int, ...]:
    return size


FORMATS = [
    (blocks, "weight_scale_inv", torch.float32, FP8),
    (blocks, "weight_scale_inv", torch.float8_e8m0fnu, {**FP8, "modules_to_not_convert": ["lm_head"]}),
    (lambda *_: (32, 2), "weight_scale_inv", torch.float32, {**FP8, "weight_block_size": [32, 2]}),  # as many as rows
    (matrix, "weight_scale_inv", torch.float32, {**FP8, "weight_block_size": None}),
    (rows, "weight_scale", torch.float32, {"quant_method": "fbgemm_fp8"}),
    (rows, "weight_scale", torch.bfloat16, {"quant_method": "compressed-tensors", "config_groups": {}}),
    (matrix, "weight_scale", torch.float32, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    (groups, "weight_scale_inv", torch.uint8, {"quant_method": "mxfp8"}),
    (groups, "weight_scale", torch.uint8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
]


@pytest.mark.parametrize(("block", "end", "scale", "quantization"), FORMATS)
async def test_fp8_reads_as_its_numbers_times_their_scales_and_saves_plain(
    original: Any, tmp_path: Path, block: Any, end: str, scale: torch.dtype, quantization: dict[str, Any]
) -> None:
    tensors, config = original
    stored, meant = rounded(tensors, block, end, scale)
    right = by_transformers(tmp_path / "plain", meant, config)
    for cache in ("q_proj.input", "k_proj.k", "v_proj.v", "k", "kv", "k_proj.output"):
        stored[f"model.layers.0.self_attn.{cache}_scale"] = torch.tensor(0.5)
    folder = write(tmp_path / "fp8", stored, config, quantization_config=quantization)
    policy = TorchPolicy(PolicyConfig(model=folder))
    batch = Batch.of(tokens=Ragged.of(IDS.tolist(), np.int32), loss_mask=Ragged.of([[False] + [True] * 6], np.bool_))
    read = await policy.logprobs(batch)
    np.testing.assert_allclose(floats(read.ragged("logprobs")[0][1:]), right[0], rtol=0, atol=2e-5)
    await policy.update(batch, CrossEntropy())
    trained = await policy.logprobs(batch)
    await policy.save(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    np.testing.assert_allclose(logprobs(again)[0], floats(trained.ragged("logprobs")[0][1:]), rtol=0, atol=2e-5)
    assert {each.dtype for each in load_file(tmp_path / "saved/model.safetensors").values()} == {torch.float32}
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    plain = plain_folder(Path(folder))  # for engines
    assert torch.allclose(logprobs(AutoModelForCausalLM.from_pretrained(plain)), right, rtol=0, atol=2e-5)
    if found := outline(ModelConfig(model=folder)):  # for FSDP and Megatron
        for name, tensor in meant.items():
            assert torch.equal(found[1].whole(name), tensor), name
        part = torch.nn.Parameter(torch.zeros(9, 7, dtype=torch.bfloat16))  # a rank's, across blocks
        name = "model.layers.0.self_attn.q_proj.weight"
        found[1].read([Box(name, tuple(meant[name].shape), (28, 12), part)])
        assert torch.equal(part.detach(), meant[name][28:37, 12:19].bfloat16())
    else:
        assert "experts" in str(sorted(meant))


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Tensors, dict[str, Any]]:
    torch.manual_seed(0)
    network = LlamaForCausalLM(LlamaConfig(**SHAPE))
    return written(network, tmp_path / "plain")


Q = "model.layers.0.self_attn.q_proj.weight"
LATER = "model.layers.1.mlp.up_proj.weight"
Change = Callable[[Tensors], Tensors]


def scaled(block: Callable[..., tuple[int, int]]) -> Change:
    return lambda tensors: rounded(tensors, block, "weight_scale_inv", torch.float32)[0]


def with_q(change: Callable[[Tensor], Tensor], name: str = Q) -> Change:
    return lambda tensors: {**tensors, name: change(tensors[Q])}


def packed(tensors: Tensors) -> Tensors:
    """As compressed-tensors writes numbers of 4 bits."""
    parts = {"packed": torch.ones(48, 6, dtype=torch.int32), "shape": torch.ones(2).long(), "scale": torch.ones(48, 1)}
    return {**{f"{Q}_{name}": part for name, part in parts.items()}, **{k: v for k, v in tensors.items() if k != Q}}


def with_kv_scales(tensors: Tensors) -> Tensors:
    return {**tensors, **{f"model.layers.0.self_attn.{each}_scale": torch.tensor(0.5) for each in "kv"}}


def headless(tensors: Tensors) -> Tensors:
    return {name: each for name, each in tensors.items() if name != "lm_head.weight"}


BROKEN: list[tuple[Change, dict[str, Any] | None, str]] = [
    (with_q(lambda q: q.to(torch.float8_e4m3fn)), FP8, f"{Q}` in the dtype F8_E4M3, and no scales"),
    (scaled(blocks), None, "no `quantization_config`"),
    (scaled(lambda *_: (8, 8)), FP8, r"no scales of .* in blocks of \[32, 16\]"),
    (with_q(lambda q: (q * 100).to(torch.int8)), None, f"{Q}` in the dtype I8"),
    (with_q(lambda q: (q * 100).to(torch.uint8)), None, f"{Q}` in the dtype U8"),
    (packed, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, f"{Q}_packed` in the dtype I32"),
    (with_q(lambda _: torch.ones(1), Q + "_scale_inv"), None, "1 tensors .* does not take .*q_proj.weight_scale_inv"),
    (with_kv_scales, None, "2 tensors .*k_scale.* these are scales, of a quantized model"),
    (with_q(lambda q: q.clone(), LATER), None, f"does not take .{LATER}"),
    (headless, None, r"lack 1 tensors \(lm_head.weight"),
    (with_q(lambda q: q[:8].clone()), None, rf"another shape than the model \({Q} \[8, 48\] for \[48, 48\]"),
    *((dict, {"quant_method": each}, f"the method '{each}'") for each in ("gptq", "awq", "bitsandbytes")),
]


@pytest.mark.parametrize(("change", "quantization", "text"), BROKEN)
def test_what_is_not_understood_is_refused_by_name(
    plain: Any, tmp_path: Path, change: Change, quantization: Any, text: str
) -> None:
    tensors, config = plain
    keys = {"quantization_config": quantization} if quantization else {}
    model = ModelConfig(model=write(tmp_path / "broken", change(tensors), config, **keys))
    for read in (load, lambda config: outline(config) or load(config)):  # torch, and the others
        with pytest.raises(ModelError, match=text):
            read(model)


@pytest.mark.parametrize("same", [False, True], ids=["own", "equal"])
async def test_a_head_in_the_files_of_a_model_that_is_called_tied(plain: Any, tmp_path: Path, same: bool) -> None:
    tensors, config = plain
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() if same else tensors["lm_head.weight"]
    folder = write(tmp_path / "tied", tensors, config, tie_word_embeddings=True)
    right = logprobs(AutoModelForCausalLM.from_pretrained(folder))
    policy = TorchPolicy(PolicyConfig(model=folder))
    await policy.save(str(tmp_path / "saved"))
    assert json.loads((tmp_path / "saved/config.json").read_text())["tie_word_embeddings"] is same
    assert outline(ModelConfig(model=folder)) is None  # read whole, by the same rule
    for each in (tmp_path / "saved", plain_folder(Path(folder))):
        assert torch.allclose(logprobs(AutoModelForCausalLM.from_pretrained(each)), right, rtol=0, atol=1e-6)


def test_scales_of_cached_keys_and_values_alone_change_nothing(plain: Any, tmp_path: Path) -> None:
    tensors, config = plain
    scales = {f"model.layers.0.self_attn.{each}_scale": torch.tensor(0.5) for each in "kv"}
    method = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}, "config_groups": {}}
    folder = Path(write(tmp_path / "cache", {**tensors, **scales}, config, quantization_config=method))
    (folder / "link").symlink_to("nowhere")
    assert load_file(plain_folder(folder) / "model.safetensors").keys() == tensors.keys()
    found = outline(ModelConfig(model=str(folder)))
    assert found is not None
    assert found[1].shapes.keys() == tensors.keys()


def test_files_beside_those_of_the_model_are_not_read(plain: Any, tmp_path: Path) -> None:
    tensors, config = plain
    model = ModelConfig(model=write(tmp_path / "model", tensors, config))
    stale = {name: torch.zeros_like(each) for name, each in tensors.items()}
    save_file(stale, tmp_path / "model/consolidated.safetensors")
    save_file(stale, tmp_path / "model/model-00001-of-00002.safetensors")
    found = outline(model)
    assert found is not None
    assert all(torch.equal(found[1].whole(name), each) for name, each in tensors.items())
    index = {"weight_map": {**dict.fromkeys(tensors, "model-1.safetensors"), "lm_head.weight": "model-2.safetensors"}}
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model/model-1.safetensors")
    save_file({"lm_head.weight": stale["lm_head.weight"]}, tmp_path / "model/model-2.safetensors")
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    for read in (load, outline):
        with pytest.raises(ModelError, match=r"has `lm_head.weight`, and another file has it too"):
            read(model)


def fours(size: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts in MXFP4 as gpt-oss has them: numbers in pairs, the exponents of their groups, and what they mean."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    experts, columns, rows = size
    drawn = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (experts, rows, columns // 32, 32), generator=drawn)
    exponents = torch.randint(118, 124, (experts, rows, columns // 32), generator=drawn)
    meant = values[codes % 8] * torch.where(codes < 8, 1.0, -1.0) * 2.0 ** (exponents[..., None] - 127)
    pairs = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return pairs, exponents.to(torch.uint8), meant.reshape(experts, rows, columns).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_mxfp4_reads_as_the_numbers_that_it_means_and_saves_plain(tmp_path: Path, dtype: Any) -> None:
    shape: dict[str, Any] = {**SHAPE, "hidden_size": 64, "intermediate_size": 32, "layer_types": ["full_attention"]}
    shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    network = AutoModelForCausalLM.from_config(GptOssConfig(**shape))
    network.bfloat16().save_pretrained(tmp_path / "plain")
    meant = load_file(tmp_path / "plain/model.safetensors")
    stored = dict(meant)
    for seed, name in enumerate(name for name in meant if name.endswith(("experts.gate_up_proj", "experts.down_proj"))):
        size = tuple(stored.pop(name).shape)
        stored[f"{name}_blocks"], stored[f"{name}_scales"], meant[name] = fours(size, seed)  # type: ignore[arg-type]
    config = json.loads((tmp_path / "plain/config.json").read_text())
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    folder = write(tmp_path / "fours", stored, config, quantization_config=method)
    policy = TorchPolicy(PolicyConfig(model=folder, dtype=dtype))
    await policy.save(str(tmp_path / "saved"))
    for each in (tmp_path / "saved", plain_folder(Path(folder))):
        found = load_file(each / "model.safetensors")
        assert found.keys() == meant.keys()
        assert all(torch.equal(found[name].float(), meant[name].float()) for name in meant)
        assert "quantization_config" not in json.loads((each / "config.json").read_text())
    assert outline(ModelConfig(model=folder)) is None  # read whole, by the same rule
