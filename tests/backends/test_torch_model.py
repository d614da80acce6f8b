"""Models by name: what loads, and what each folder that does not is told."""

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from meshrl import Batch, CrossEntropy, ModelConfig, NewModel, PolicyConfig, SamplerConfig, Sampling
from meshrl.errors import ConfigError, ModelError
from meshrl_hf.loading import load
from meshrl_hf.model import LanguageModel, ready
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.sampler import TorchSampler

MODEL = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A good folder, for a test to spoil."""
    await TorchPolicy(PolicyConfig(model=MODEL)).save(str(tmp_path / "model"))
    return tmp_path / "model"


def test_a_new_model() -> None:
    model = load(ModelConfig(model=MODEL))
    assert sum(tensor.numel() for tensor in model.tensors().values()) == 11 * 16 + 2 * (4 * 256 + 3 * 384 + 32) + 16
    ids = model.tokenizer("ab> \n"[:3])["input_ids"]
    assert ids == [2, 3, 10]
    assert model.tokenizer.decode([2, 3, 10, 1], skip_special_tokens=True) == "ab>"
    assert (model.tokenizer.bos_token_id, model.tokenizer.eos_token_id, model.max_tokens) == (None, 1, 48)
    state = torch.random.get_rng_state()
    again = load(ModelConfig(model=MODEL))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in model.tensors().items())


async def test_a_saved_folder_loads_again(folder: Path) -> None:
    model, again = load(ModelConfig(model=MODEL)), load(ModelConfig(model=str(folder)))
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in model.tensors().items())
    assert again.tokenizer("ab>")["input_ids"] == [2, 3, 10]


async def test_a_chat_template_wraps_prompts(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}a{{ message.content }}{% endfor %}{{ 'b' }}"
    tokenizer.save_pretrained(folder)
    policy = TorchPolicy(PolicyConfig(model=str(folder), chat=True))
    batch = await policy.encode(Batch.of(prompt=["c>"], completion=["d"]))
    assert batch.tokens[0].tolist() == [2, 4, 10, 3, 5, 1]


async def test_a_chat_template_is_given_its_variables(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0].content }}{% if not enable_thinking %}aa{% endif %}"
    tokenizer.save_pretrained(folder)
    for thinks, prompt in ((True, [4]), (False, [4, 2, 2])):
        table = {"model": str(folder), "chat": True, "chat_template_kwargs": {"enable_thinking": thinks}}
        policy = TorchPolicy(PolicyConfig.model_validate(table))
        sampler = TorchSampler(SamplerConfig.model_validate(table))
        trained = await policy.encode(Batch.of(prompt=["c"], completion=["d"]))
        assert trained.tokens[0].tolist() == [*prompt, 5, 1]
        (drawn,) = [part async for part in sampler.generate(Batch.of(prompt=["c"]), Sampling(max_tokens=1))]
        assert drawn.tokens[0].tolist()[:-1] == prompt


def rewrite(folder: Path, name: str, **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def no_end(folder: Path) -> None:
    rewrite(folder, "tokenizer_config.json", eos_token=None)


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a model")


def pickled(folder: Path) -> None:
    """The same weights as torch pickles them, which would be unpickled."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def unknown_model(folder: Path) -> None:
    rewrite(folder, "config.json", model_type="llama9")


def masked(folder: Path) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    BertForMaskedLM(BertConfig(vocab_size=11, **shape)).save_pretrained(folder)


def encoder_decoder(folder: Path) -> None:
    shape: dict[str, Any] = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    T5ForConditionalGeneration(T5Config(vocab_size=11, **shape)).save_pretrained(folder)


def state_space(folder: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "eos_token_id": 1}
    MambaForCausalLM(MambaConfig(vocab_size=11, **shape)).save_pretrained(folder)


def capped(folder: Path) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = Gemma2Config(vocab_size=11, **shape, num_key_value_heads=2, head_dim=8, eos_token_id=1)
    Gemma2ForCausalLM(config).save_pretrained(folder)


def a_layer_short(folder: Path) -> None:
    rewrite(folder, "config.json", num_hidden_layers=3)


def another_shape(folder: Path) -> None:
    rewrite(folder, "config.json", intermediate_size=32)


def larger_tokenizer(folder: Path) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=5, **shape)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (empty, "has no config.json, so it is not a Hugging Face model"),
        (no_tokenizer, "tokenizer cannot be loaded .tokenizer.json"),
        (no_end, "has no end-of-text token"),
        (truncated, "cannot be loaded as a causal language model: SafetensorError"),
        (garbage, "cannot be loaded as a causal language model: SafetensorError"),
        (no_weights, "cannot be loaded as a causal language model: OSError"),
        (pickled, "cannot be loaded as a causal language model: .*safetensors"),
        (broken_config, "cannot be loaded as a causal language model"),
        (unknown_model, "cannot be loaded as a causal language model: .*llama9"),
        (masked, "is a BertForMaskedLM, not a causal language model"),
        (encoder_decoder, "cannot be loaded as a causal language model"),
        (state_space, "MambaForCausalLM"),
        (capped, "uses capped attention scores, which the torch backend does not have"),
        (a_layer_short, "its files lack 9 tensors"),
        (another_shape, "cannot be loaded as a causal language model"),
        (larger_tokenizer, "tokenizer of .* has 11 tokens and the model 5"),
    ],
)
async def test_folders_that_are_no_model(folder: Path, spoil: Callable[[Path], None], text: str) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=text):
        load(ModelConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere", "nowhere does not exist"),
        ("HuggingFaceTB/SmolLM2-135M", "there is no such folder, and .* the files are not in the cache"),
        ("package:meshrl", "write package:NAME/FILE"),
        ("package:no_such_package/a.gguf", "no package 'no_such_package' is installed"),
        ("package:meshrl/a.gguf", "package 'meshrl' has no 'a.gguf'; it has no GGUF file"),
        ("{tmp}/file.bin", "is a file: give a Hugging Face folder"),
        ("{tmp}/file.gguf", "transformers cannot read this GGUF file"),
    ],
)
def test_names_of_no_model(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "file.bin").write_bytes(b"x")
    (tmp_path / "file.gguf").write_bytes(b"not GGUF")
    with pytest.raises(ModelError, match=text):
        load(ModelConfig(model=name.format(tmp=tmp_path)))


def write_gguf(path: Path) -> None:
    """A Llama of one layer, quantised, with a byte-pair tokenizer."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(48)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
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


def test_a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"for GGUF name the file, as in .*tiny\.gguf"):
        load(ModelConfig(model=str(tmp_path)))


def test_chat_needs_a_template() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        load(ModelConfig(model=MODEL, chat=True))


def test_characters_twice() -> None:
    with pytest.raises(ConfigError, match=r"model\.characters has 'ab' twice"):
        load(ModelConfig(model=MODEL.model_copy(update={"characters": "abcab"})))


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(ModelError, match=r"hidden_size 16 over model\.heads 3"):
        load(ModelConfig(model=MODEL.model_copy(update={"heads": 3})))


async def test_save_spares_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ModelError, match=r"has other files and no config\.json"):
        await TorchPolicy(PolicyConfig(model=MODEL)).save(str(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside hold at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.most = 0
        self._kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        result = func(*args, **(kwargs if isinstance(kwargs, Mapping) else {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._kept:
                self._keep(key, tensor.untyped_storage())
        self.most = max(self.most, self.held)
        return result

    def _keep(self, key: int, storage: torch.UntypedStorage) -> None:
        def free(_: object, size: int = storage.nbytes()) -> None:
            self.held -= size
            del self._kept[key]

        self.held += storage.nbytes()
        self._kept[key] = weakref.ref(storage, free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tempered", [False, True])
def test_logprobs_of_a_large_vocabulary_hold_little(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tempered: bool
) -> None:
    tokens, vocabulary = 512, 20_000
    monkeypatch.setattr("meshrl_hf.model.MAX_LOGITS", 32 * vocabulary)
    shape: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    network = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **shape, eos_token_id=1, dtype=dtype))
    network = network.bfloat16() if dtype == torch.bfloat16 else network
    model = ready(network, load(ModelConfig(model=MODEL)).tokenizer, chat=None)
    chosen = torch.arange(tokens) * 7
    temperature = torch.linspace(0.5, 2, tokens) if tempered else None
    made: list[tuple[int, Tensor, Tensor | None]] = []
    for way in (naive, LanguageModel.logprobs):
        network.zero_grad()
        hidden = torch.linspace(-2, 2, tokens * 8, dtype=dtype).sin().reshape(tokens, 8).requires_grad_()
        with Peak() as peak:
            told = way(model, hidden, chosen, temperature)
            (told[:, 0] @ torch.linspace(-1, 1, tokens)).backward()
        made.append((peak.most, told, hidden.grad))
    (most, *plain), (own, *chunked) = made
    assert own < most / 4
    for expected, result in zip(plain, chunked, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def naive(model: LanguageModel, hidden: Tensor, chosen: Tensor, temperature: Tensor | None) -> Tensor:
    logits = model.logits(hidden)
    if temperature is not None:
        logits = logits / temperature[:, None]
    drawn = torch.distributions.Categorical(logits=logits)
    return torch.stack([drawn.log_prob(chosen), drawn.entropy()], 1)
