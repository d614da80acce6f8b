import gc
import subprocess
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, Qwen3Config

import meshrl as rl
from meshrl.errors import ConfigError
from meshrl.mesh import Same
from meshrl.roles import MemoryEstimate, Workload, memory_of, with_options
from meshrl_inference.memory import weight_bytes
from meshrl_megatron.roles import MegatronPolicy
from meshrl_torch.estimate.flops import flops_of
from meshrl_torch.train.fsdp.roles import FsdpPolicy
from meshrl_torch.train.one_rank import TorchCritic, TorchPolicy, TorchReference
from meshrl_vllm.options import VllmConfig
from tests.backends.material import ModelOf, Warm, changed, on_ranks

ROOT = Path(__file__).parents[2]
PROMPT, COMPLETION, ROWS, N = 20, 40, 32, 4
FEW = 16
"""Rows of a step of four ranks, whose profiles take long to read."""
WORK = Workload({"dp": 1}, PROMPT, COMPLETION, ROWS, N, gpu=0)
LLAMA = rl.NewModel(
    characters="".join(map(chr, range(0x4E00, 0x4E00 + 1500))),
    hidden_size=96, ffn_size=256, layers=3, heads=4, max_tokens=128,
)  # fmt: skip
QWEN = Qwen3Config(
    hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    head_dim=32, vocab_size=2000, max_position_embeddings=256, tie_word_embeddings=False,
)  # fmt: skip
CONVOLUTIONS = transformers.Lfm2Config(
    hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    vocab_size=2000, max_position_embeddings=256, layer_types=["conv"] * 4, tie_word_embeddings=False,
)  # fmt: skip


def rollouts(rows: int = ROWS) -> rl.Batch:
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, 11, (rows // N, PROMPT))
    pairs = [(prompts[row // N], rng.integers(2, 11, COMPLETION)) for row in range(rows)]
    tokens = rl.Ragged.of([np.concatenate(pair) for pair in pairs], np.int32)
    values = np.full(len(tokens.values), -2.0, np.float32)
    return rl.Batch.of(
        tokens=tokens,
        loss_mask=rl.Ragged(np.tile(np.arange(PROMPT + COMPLETION) >= PROMPT, rows), tokens.offsets),
        sampler_logprobs=rl.Ragged(values, tokens.offsets),
        values=rl.Ragged(values, tokens.offsets),
        returns=rl.Ragged(values, tokens.offsets),
        advantages=rng.normal(size=rows).astype(np.float32),
    )


def most(profiled: Any) -> int:
    """The most bytes of tensors that were alive at once, but for the copies that gloo makes, and NCCL does not."""
    waiting = list(profiled.profiler.kineto_results.experimental_event_tree())
    events = list[tuple[int, int, int, bool]]()
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            told, above = event.extra_fields, event.parent
            own = above is not None
            while above is not None:
                own, above = own and not above.name.startswith("c10d::"), above.parent
            events.append((event.start_time_ns, told.alloc_size, told.ptr, own))
    alive, now, peak = dict[int, int](), 0, 0
    for _, size, pointer, own in sorted(events):
        if size > 0 and own:
            alive[pointer] = size
            now += size
            peak = max(peak, now)
        elif size < 0:
            now -= alive.pop(pointer, 0)
    return peak


async def measured(work: Coroutine[None, None, None]) -> int:
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        await work
    return most(profiled)


def told(memory: MemoryEstimate | None) -> int:
    assert memory is not None
    assert min(term.nbytes for term in memory.terms) > 0
    assert len({term.during for term in memory.terms} - {""}) == 1
    return sum(term.nbytes for term in memory.terms)


async def taken_by(role: type[TorchPolicy | FsdpPolicy | MegatronPolicy], config: rl.PolicyConfig, rows: int) -> int:
    async def run() -> None:
        policy = role(config)
        for _ in range(2):  # the moments are there from the first one on
            await policy.update(rollouts(rows), rl.ClippedLoss())

    return await measured(run())


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16", "activation_checkpointing": True},
        {"lora": {"rank": 4}},
        {"model": QWEN},
        {"packing": "padded"},
        {"model": CONVOLUTIONS},
    ],
    ids=list,
)
async def test_a_policys_memory_is_told_within_a_tenth(
    changes: Mapping[str, object], model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshrl_torch.model.network.MAX_LOGITS", 1500 * 150)  # a micro-batch's are made in chunks
    model = model_of(changes["model"]) if "model" in changes else LLAMA
    config = rl.PolicyConfig.model_validate({**changes, "model": model, "micro_batch_tokens": 500})
    files = Path(model).glob("*.safetensors") if isinstance(model, str) else []
    mapped = sum(file.stat().st_size for file in files)  # it comes from no allocator
    assert told(memory_of(config, WORK)) == pytest.approx(await taken_by(TorchPolicy, config, ROWS) + mapped, rel=0.1)


async def test_a_critics_and_a_references_memory_is_told_within_a_tenth() -> None:
    critic = rl.CriticConfig(model=LLAMA, micro_batch_tokens=500)
    reference = rl.ReferenceConfig(model=LLAMA, micro_batch_tokens=500)

    async def learn() -> None:
        made = TorchCritic(critic)
        for _ in range(2):
            await made.update(rollouts(), rl.ValueLoss())

    async def score() -> None:
        await TorchReference(reference).logprobs(rollouts())

    assert told(memory_of(critic, WORK)) == pytest.approx(await measured(learn()), rel=0.1)
    assert told(memory_of(reference, WORK)) == pytest.approx(await measured(score()), rel=0.1)


PRINT_THE_PAGE = 'import runpy, sys; sys.stdout.write(runpy.run_path("docs/memory.py")["written"]())'


@pytest.mark.wide
@pytest.mark.slow
def test_the_page_says_what_is_told() -> None:
    printed = subprocess.run([sys.executable, "-c", PRINT_THE_PAGE], cwd=ROOT, capture_output=True, check=True).stdout
    assert printed.decode() == (ROOT / "docs/gpu.md").read_text("utf-8"), "run python docs/memory.py"


ASKED = {"prompt": 512, "completion": 2048, "rows": 512, "n": 8, "gpu": 80 * 2**30}
MODELS = ROOT / "tests" / "data" / "models"
BILLIONS = {
    "llama-8b": 8.03, "llama-70b": 70.6, "qwen3-0.6b": 0.6, "qwen3-4b": 4.0, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
}  # fmt: skip
"""Parameters by the models' cards."""


def test_real_models_have_as_many_parameters_as_their_cards_say() -> None:
    assert {folder.name for folder in MODELS.iterdir() if folder.is_dir()} == set(BILLIONS)
    for name, number in BILLIONS.items():
        shape = AutoConfig.from_pretrained(MODELS / name, local_files_only=True)
        assert weight_bytes(shape, 1, "") / 1e9 == pytest.approx(number, abs=0.05), name


def test_an_engine_says_how_many_rows_fit_in_what_the_weights_leave_of_its_share() -> None:
    config = rl.SamplerConfig(model=str(MODELS / "llama-8b"), backend="vllm", dtype="bfloat16")
    memory = memory_of(config, Workload({"dp": 4, "tp": 2}, **ASKED))
    assert memory is not None
    terms = {term.name: term.nbytes for term in memory.terms}
    assert terms["weights"] == 8_030_261_248
    assert sum(terms.values()) == int(0.9 * 80 * 2**30)
    a_token = 2 * 32 * 4 * 128 * 2  # keys and values, layers, heads of this rank, dims, bytes
    (note,) = memory.notes
    assert f"{terms['KV cache'] // (a_token * 2560)} rows of 2560 tokens fit, of 128 at once" in note
    small = memory_of(with_options(config, VllmConfig(quantization="fp8")), Workload({"dp": 4, "tp": 2}, **ASKED))
    assert small is not None
    linear = 32 * 2 * (4096 + 1024) * 4096 + 32 * 3 * 14336 * 4096  # q and o, k and v; the feed-forward three
    rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert small.terms[0].nbytes == 8_030_261_248 - linear // 2 + rows * 4 // 2
    assert small.terms[0].formula == "all parameters in bfloat16, and matrices in fp8, over tp = 2"
    tight = config.model_copy(update={"vllm": VllmConfig(memory_share=0.05)})
    with pytest.raises(ConfigError, match=r"memory_share = 0.05 .* leaves nothing for keys and values"):
        memory_of(tight, Workload({"dp": 4, "tp": 2}, **ASKED))


SIZES: dict[str, Any] = {"vocab_size": 53, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
DENSE: dict[str, Any] = {**SIZES, "intermediate_size": 96, "num_hidden_layers": 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MIXED: dict[str, Any] = {**SIZES, **EXPERTS, "num_hidden_layers": 2}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
COUNTED = [
    transformers.LlamaConfig(**DENSE),
    transformers.Qwen3MoeConfig(**changed(MIXED, head_dim=24)),
    transformers.Qwen2MoeConfig(**MIXED, shared_expert_intermediate_size=56),
    transformers.Gemma3TextConfig(**DENSE, head_dim=16, sliding_window=7, layer_types=KINDS),
    transformers.MistralConfig(**DENSE, sliding_window=7),  # all its layers have the window
]
ROUTER = 2 * 64 * 4 * 2
"""Operations of the routers of a mixture for a token, which are left out because they are few."""


def counted(shape: transformers.PretrainedConfig, length: int) -> int:
    plain: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(shape, **plain)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)
    return int(counter.get_total_flops())


def test_operations_are_told_as_those_of_a_pass(tmp_path: Path) -> None:
    more = {"qwen3_moe": ROUTER, "qwen2_moe": ROUTER + 2 * 64 * 2}
    near = {"mistral": 1.0, "gemma3_text": KINDS.count("sliding_attention") / len(KINDS)}
    for shape in COUNTED:
        shape.save_pretrained(tmp_path)
        flops = flops_of(rl.PolicyConfig(model=str(tmp_path)))
        short, long = counted(shape, 20), counted(shape, 40)
        assert (flops.per_pair + flops.per_near_pair) * 20**2 == (long - 2 * short) / 2, shape.model_type
        alone = (4 * short - long) / 40
        told = flops.per_token + more.get(shape.model_type, 0)
        assert told == pytest.approx(alone, rel=1e-3)  # the angles of positions too
        share = near.get(shape.model_type, 0.0)
        assert flops.per_near_pair == pytest.approx(share * (flops.per_pair + flops.per_near_pair))
        assert flops.window == (7 if share else 0)
        without_head = flops.per_token - 2 * 64 * 53
        for config in (rl.CriticConfig(model=str(tmp_path)), rl.RewardModelConfig(model=str(tmp_path))):
            assert flops_of(config).per_token == without_head


SPLIT: Mapping[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "vocab_size": 2000, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "dense": transformers.Qwen3Config(**SPLIT, intermediate_size=320),
    "experts": transformers.Glm4MoeConfig(
        **SPLIT,
        intermediate_size=320,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=4,
    ),  # half of its layers have none
}
CASES: Mapping[str, tuple[str, Mapping[str, int], Mapping[str, Any]]] = {
    "dp": ("dense", {"dp": 4}, {}),
    "cp": ("dense", {"dp": 2, "cp": 2}, {}),
    "pp and tp": ("dense", {"dp": 1, "pp": 2, "tp": 2}, {"dtype": "bfloat16"}),
    "virtual stages": ("dense", {"dp": 2, "pp": 2}, {"megatron": {"virtual_stages": 2}}),
    "tp, recomputed": ("dense", {"dp": 2, "tp": 2}, {"activation_checkpointing": True, "dtype": "bfloat16"}),
    "experts": ("experts", {"dp": 2, "tp": 2}, {"megatron": {"experts": 2}}),
}
RARE = ["dp", "cp", "virtual stages", "tp, recomputed"]


class Measured(rl.Actor):
    @rl.endpoint
    async def taken(self, config: rl.PolicyConfig, rows: int) -> rl.Gather[np.ndarray]:
        return np.array([await taken_by(MegatronPolicy, config, rows)])

    @rl.endpoint
    async def before(self, config: rl.PolicyConfig, work: Workload) -> Same[int]:
        return told(memory_of(config, work))


@on_ranks
@pytest.mark.parametrize("lora", [None, rl.LoraConfig(rank=8)], ids=["whole", "adapters"])
async def test_a_sharded_policys_memory_is_told_within_a_tenth(warm: Warm, lora: rl.LoraConfig | None) -> None:
    config = rl.PolicyConfig(model=LLAMA, backend="fsdp", dtype="bfloat16", micro_batch_tokens=500, lora=lora)
    before = await (await (await warm(1)).spawn(Measured)).before(config, WORK)
    assert before == pytest.approx(await taken_by(FsdpPolicy, config, ROWS), rel=0.1)


@on_ranks
@pytest.mark.megatron
@pytest.mark.parametrize(
    "cases", [["pp and tp", "experts"], pytest.param(RARE, marks=pytest.mark.wide)], ids=["covering", "others"]
)
async def test_a_split_policys_memory_is_told_within_a_tenth(
    warm: Warm, model_of: ModelOf, cases: Sequence[str]
) -> None:
    four, apart = await warm(4), dict[str, tuple[int, int]]()
    teller = await (await warm(1)).spawn(Measured)
    folders = {name: model_of(shape, noise=0) for name, shape in SHAPES.items()}
    for case in cases:
        model, axes, changes = CASES[case]
        table = {"model": folders[model], "backend": "megatron", "micro_batch_tokens": 250, **changes}
        config = rl.PolicyConfig.model_validate(table)
        before = await teller.before(config, Workload(axes, PROMPT, COMPLETION, FEW, N, gpu=0))
        taken = await (await four.shape(**axes).spawn(Measured)).taken(config, FEW // axes["dp"])
        measured = int(np.mean(taken) if model == "experts" else np.max(taken))
        if before != pytest.approx(measured, rel=0.1):
            apart[case] = before, measured
    assert not apart, "told, and measured"
