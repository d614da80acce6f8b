"""What the backends tell of memory before a run, against what torch's own profiler counts in one, on a CPU."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, Qwen3Config

import meshrl as rl
from meshrl.errors import ConfigError
from meshrl.roles import Memory, Work, memory_of
from meshrl_fsdp.policy import FsdpPolicy
from meshrl_inference.memory import parameters_of
from meshrl_torch.critic import TorchCritic
from meshrl_torch.policy import TorchPolicy
from meshrl_torch.reference import TorchReference
from meshrl_vllm.options import VllmConfig

ROOT = Path(__file__).parents[2]
PROMPT, COMPLETION, ROWS, N = 20, 40, 32, 4
WORK = Work({"dp": 1}, PROMPT, COMPLETION, ROWS, N, gpu=0)
LLAMA = rl.NewModel(
    characters="".join(map(chr, range(0x4E00, 0x4E00 + 1500))),
    hidden_size=96, ffn_size=256, layers=5, heads=4, max_tokens=128,
)  # fmt: skip
QWEN = Qwen3Config(
    hidden_size=128, intermediate_size=320, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
    head_dim=32, vocab_size=2000, max_position_embeddings=256, tie_word_embeddings=False,
)  # fmt: skip


def rollouts(rows: int = ROWS) -> rl.Batch:
    """Rows of the lengths that `WORK` names."""
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


def measured(work: Callable[[], Coroutine[None, None, None]]) -> int:
    """The most bytes that tensors took while this ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        asyncio.run(work())
    return most(profiled)


def told(memory: Memory | None) -> int:
    """What is held always, and the call that takes most."""
    assert memory is not None
    assert min(term.nbytes for term in memory.terms) > 0
    assert len({term.during for term in memory.terms} - {""}) == 1
    return sum(term.nbytes for term in memory.terms)


async def two_updates(policy: TorchPolicy | FsdpPolicy) -> None:
    for _ in range(2):  # the moments are there from the first one on
        await policy.update(rollouts(), rl.ClippedLoss())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": LLAMA, "dtype": "bfloat16", "activation_checkpointing": True},
        {"model": LLAMA, "lora": {"rank": 4}},
        {"model": "qwen"},
    ],
    ids=["bfloat16 and recomputed activations", "adapters", "grouped heads"],
)
def test_a_policys_memory_is_told_within_a_tenth(
    changes: Mapping[str, object],
    random_model: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshrl_hf.model.MAX_LOGITS", 1500 * 150)  # so that a micro-batch's logits are made in chunks
    model = random_model(QWEN, tmp_path) if changes["model"] == "qwen" else changes["model"]
    config = rl.PolicyConfig.model_validate({**changes, "model": model, "micro_batch_tokens": 500})

    async def run() -> None:
        await two_updates(TorchPolicy(config))

    mapped = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))  # it comes from no allocator
    assert told(memory_of(config, WORK)) == pytest.approx(measured(run) + mapped, rel=0.1)


def test_a_critics_and_a_references_memory_is_told_within_a_tenth() -> None:
    critic = rl.CriticConfig(model=LLAMA, micro_batch_tokens=500)
    reference = rl.ReferenceConfig(model=LLAMA, micro_batch_tokens=500)

    async def learn() -> None:
        made = TorchCritic(critic)
        for _ in range(2):
            await made.update(rollouts(), rl.ValueLoss())

    async def score() -> None:
        made = TorchReference(reference)
        await made.logprobs(rollouts())

    assert told(memory_of(critic, WORK)) == pytest.approx(measured(learn), rel=0.1)
    assert told(memory_of(reference, WORK)) == pytest.approx(measured(score), rel=0.1)


TELL = """
import sys
import msgspec
from meshrl import PolicyConfig
from meshrl.roles import Work, memory_of

config, work = msgspec.json.decode(sys.stdin.buffer.read())
sys.stdout.buffer.write(msgspec.json.encode(memory_of(PolicyConfig.model_validate(config), Work(**work))))
"""
PRINT_THE_PAGE = 'import runpy, sys; sys.stdout.write(runpy.run_path("docs/memory.py")["written"]())'


def apart(code: str, given: bytes = b"") -> bytes:
    """What this prints in a process of its own, which is in no process group."""
    return subprocess.run([sys.executable, "-c", code], input=given, cwd=ROOT, capture_output=True, check=True).stdout


def test_a_sharded_policys_memory_is_told_within_a_tenth() -> None:
    config = rl.PolicyConfig(model=LLAMA, backend="fsdp", dtype="bfloat16", micro_batch_tokens=500)

    async def run() -> None:
        await two_updates(FsdpPolicy(config))

    answer = apart(TELL, msgspec.json.encode((config.model_dump(mode="json"), WORK)))
    assert told(msgspec.json.decode(answer, type=Memory)) == pytest.approx(measured(run), rel=0.1)


@pytest.mark.wide
@pytest.mark.slow
def test_the_page_says_what_is_told() -> None:
    assert apart(PRINT_THE_PAGE).decode() == (ROOT / "docs/gpu.md").read_text("utf-8"), "run python docs/memory.py"


ASKED = {"prompt": 512, "completion": 2048, "rows": 512, "n": 8, "gpu": 80 * 2**30}
MODELS = ROOT / "tests" / "data" / "models"
BILLIONS = {
    "llama-8b": (8.03, 0.005),
    "llama-70b": (70.6, 0.05),
    "qwen3-0.6b": (0.6, 0.05),
    "qwen3-4b": (4.0, 0.05),
    "qwen3-32b": (32.8, 0.05),
    "qwen3-30b-a3b": (30.5, 0.05),
}
"""Parameters by the models' cards, and by how much they are rounded."""


def test_real_models_have_as_many_parameters_as_their_cards_say() -> None:
    assert {folder.name for folder in MODELS.iterdir() if folder.is_dir()} == set(BILLIONS)
    for name, (number, rounding) in BILLIONS.items():
        shape = AutoConfig.from_pretrained(MODELS / name, local_files_only=True)
        assert parameters_of(shape) / 1e9 == pytest.approx(number, abs=rounding), name


def test_an_engine_says_how_many_rows_fit_in_what_the_weights_leave_of_its_share() -> None:
    config = rl.SamplerConfig(model=str(MODELS / "llama-8b"), backend="vllm", dtype="bfloat16")
    memory = memory_of(config, Work({"dp": 4, "tp": 2}, **ASKED))
    assert memory is not None
    terms = {term.name: term.nbytes for term in memory.terms}
    assert terms["weights"] == 8_030_261_248
    assert sum(terms.values()) == int(0.9 * 80 * 2**30)
    a_token = 2 * 32 * 4 * 128 * 2  # keys and values, layers, heads of this rank, dims, bytes
    (note,) = memory.notes
    assert f"{terms['KV cache'] // (a_token * 2560)} rows of 2560 tokens fit, of 128 at once" in note
    small = memory_of(rl.with_options(config, VllmConfig(quantization="fp8")), Work({"dp": 4, "tp": 2}, **ASKED))
    assert small is not None
    linear = 32 * 2 * (4096 + 1024) * 4096 + 32 * 3 * 14336 * 4096  # q and o, k and v; the feed-forward three
    rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert small.terms[0].nbytes == 8_030_261_248 - linear // 2 + rows * 4 // 2
    assert small.terms[0].formula == "all parameters in bfloat16, and matrices in fp8, over tp = 2"
    tight = config.model_copy(update={"vllm": VllmConfig(memory_share=0.05)})
    with pytest.raises(ConfigError, match=r"memory_share = 0.05 .* leaves nothing for keys and values"):
        memory_of(tight, Work({"dp": 4, "tp": 2}, **ASKED))
