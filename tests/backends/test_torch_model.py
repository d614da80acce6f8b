import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file
from torch import Tensor

from meshrl import Batch, CrossEntropy, PolicyConfig
from meshrl.errors import ModelError
from meshrl.roles import ModelConfig
from meshrl_torch.model.loading import load
from meshrl_torch.model.network import ready
from meshrl_torch.train.one_rank import TorchPolicy
from tests.backends.material import MODEL

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    await TorchPolicy(PolicyConfig(model=MODEL)).save(str(tmp_path / "model"))
    return tmp_path / "model"


async def test_a_new_model_is_made_of_its_seed_alone_and_a_saved_one_is_the_same(folder: Path) -> None:
    model = load(ModelConfig(model=MODEL))
    assert sum(tensor.numel() for tensor in model.tensors().values()) == 11 * 16 + 2 * (4 * 256 + 3 * 384 + 32) + 16
    assert model.tokenizer.decode([2, 3, 10, 1], skip_special_tokens=True) == "ab>"
    assert (model.tokenizer.bos_token_id, model.tokenizer.eos_token_id, model.max_tokens) == (None, 1, 48)
    state, again = torch.random.get_rng_state(), load(ModelConfig(model=MODEL))
    assert torch.equal(torch.random.get_rng_state(), state)
    for other in (again, load(ModelConfig(model=str(folder)))):
        assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in model.tensors().items())
        assert other.tokenizer("ab>")["input_ids"] == [2, 3, 10]


def save(folder: Path, network: Any, **options: object) -> None:
    network(network.config_class(**{"vocab_size": 11, **options})).save_pretrained(folder)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


T5: dict[str, Any] = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
UNLOADED = "cannot be loaded as a causal language model"


def take_ends(folder: Path) -> None:
    rewrite(folder / "tokenizer_config.json", eos_token=None)
    for file in ("config.json", "generation_config.json"):
        rewrite(folder / file, eos_token_id=None)


SPOILT: Sequence[tuple[Callable[[Path], object], str]] = [
    (take_ends, "has no end-of-text token"),
    (pickle_weights, f"{UNLOADED}: .*safetensors"),
    (lambda folder: (folder / "config.json").write_bytes(b"{"), UNLOADED),
    (lambda folder: rewrite(folder / "config.json", model_type="llama9"), f"{UNLOADED}: .*llama9"),
    (lambda folder: save(folder, transformers.BertForMaskedLM, **SIZES), "is a BertForMaskedLM, not a"),
    (lambda folder: save(folder, transformers.T5ForConditionalGeneration, **T5), UNLOADED),
]


def test_what_is_no_model_is_refused_with_the_reason(folder: Path, tmp_path: Path) -> None:
    for number, (change, text) in enumerate(SPOILT):
        copy = shutil.copytree(folder, tmp_path / f"spoilt-{number}")
        change(copy)
        with pytest.raises(ModelError, match=text):
            load(ModelConfig(model=str(copy)))
    (tmp_path / "file.bin").write_bytes(b"x")
    (tmp_path / "file.gguf").write_bytes(b"not GGUF")
    for name, text in (
        ("package:meshrl", "write package:NAME/FILE"),
        (f"{tmp_path}/file.bin", "is a file: give a Hugging Face folder"),
        (f"{tmp_path}", r"for GGUF name the file, as in .*file\.gguf"),
    ):
        with pytest.raises(ModelError, match=text):
            load(ModelConfig(model=name))


def write_gguf(path: Path) -> None:
    writer = GGUFWriter(path, "llama")
    sizes = {"context_length": 48, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32}
    heads = {"head_count": 2, "head_count_kv": 2, "layer_norm_rms_eps": 1e-6, "rope_dimension_count": 16}
    for name, size in {**sizes, **heads}.items():
        getattr(writer, f"add_{name}")(size)
    tokens = ["<eos>", *"abcdefgh>", "ab"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 10)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    rng = np.random.default_rng(0)
    for name in ("token_embd", "output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        shape = {"token_embd": (len(tokens), 32)}.get(name, (32,))
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.3, shape).astype(np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        blocks = quantize(rng.normal(0, 0.3, (32, 32)).astype(np.float32), GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


async def test_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    policy = TorchPolicy(PolicyConfig(model=str(tmp_path / "tiny.gguf")))
    batch = await policy.encode(Batch.of(prompt=["abc>"], completion=["h"]))
    assert batch.tokens[0].tolist() == [10, 3, 9, 8, 0]
    await policy.update(batch, CrossEntropy())
    await policy.save(str(tmp_path / "model"))
    again = TorchPolicy(PolicyConfig(model=str(tmp_path / "model")))
    assert (await again.weights()).fingerprint() == (await policy.weights()).fingerprint()


@pytest.mark.parametrize(("dtype", "tempered"), [(torch.float32, True), (torch.bfloat16, False)])
def test_logprobs_of_a_large_vocabulary_are_computed_in_chunks_with_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tempered: bool
) -> None:
    tokens, vocabulary = 100, 500
    monkeypatch.setattr("meshrl_torch.model.network.MAX_LOGITS", 32 * vocabulary)
    shape: dict[str, Any] = {**SIZES, "hidden_size": 8, "vocab_size": vocabulary, "eos_token_id": 1}
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    network = network.bfloat16() if dtype == torch.bfloat16 else network
    model = ready(network, load(ModelConfig(model=MODEL)).tokenizer, chat=None)
    chosen = torch.arange(tokens) * 4
    temperature = torch.linspace(0.5, 2, tokens) if tempered else None

    def naive(hidden: Tensor) -> Tensor:
        logits = model.logits(hidden)
        drawn = torch.distributions.Categorical(logits=logits if temperature is None else logits / temperature[:, None])
        return torch.stack([drawn.log_prob(chosen), drawn.entropy()], 1)

    made: list[tuple[Tensor, Tensor | None]] = []
    for way in (naive, lambda hidden: model.logprobs(hidden, chosen, temperature)):
        hidden = torch.linspace(-2, 2, tokens * 8, dtype=dtype).sin().reshape(tokens, 8).requires_grad_()
        told = way(hidden)
        (told[:, 0] @ torch.linspace(-1, 1, tokens)).backward()
        made.append((told, hidden.grad))
    for expected, result in zip(*made, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
