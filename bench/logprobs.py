"""Peak memory of log-probs over a vocabulary of 150,000, forward and backward, against the naive computation.

    python bench/logprobs.py --json F [--tokens 8192]

The head has the shape of Qwen2.5-0.5B's, 896 dims, with 8,192 tokens, each at a temperature. The naive way makes all
logits in float32, divides them, takes `log_softmax` and gathers. Each way runs in a new process and must give the same
log-probs and gradients. The growth of memory from the hidden states to the last gradient counts. On a CPU this is the
process's peak of pages (VmHWM; float32), on a GPU the peak of torch's allocator (bfloat16).

The naive way needs 16 GiB. If less is free, fewer tokens are used, and the figures say how many. About 4 minutes.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench.harness import Figure, arguments, report, within
from meshrl import NewModel
from meshrl.roles import ModelConfig
from meshrl_torch.model.loading import load
from meshrl_torch.model.network import LanguageModel, ready

VOCABULARY: Final = 150_000
DIMS: Final = 896
TOKENS: Final = 8192
WAYS: Final = ("meshrl", "naive")


def main() -> None:
    parser = arguments(__doc__, rounds=None)
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"at most so many (default: {TOKENS:,})")
    parser.add_argument("--worker", choices=WAYS, help="be this contestant")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.worker, options.tokens)))
        return
    report("logprobs", compare(options.tokens), options.json)


def compare(tokens: int = TOKENS) -> list[Figure]:
    """Measure both, one after the other."""
    while naive_bytes(tokens) > free_bytes():
        tokens //= 2
        if not tokens:
            raise SystemExit("the naive way needs more memory than is free, for however few tokens")
    answers: list[dict[str, float]] = []
    for way in WAYS:
        command = [sys.executable, __file__, "--worker", way, "--tokens", str(tokens)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        answers.append(json.loads(output.splitlines()[-1]))
    own, naive = answers
    for what in ("logprob", "gradient"):
        if not math.isclose(own[what], naive[what], rel_tol=1e-2 if torch.cuda.is_available() else 1e-4):
            raise SystemExit(f"the contestants differ in their {what}: {own[what]} and {naive[what]}")
    name = f"memory of log-probs, vocabulary {VOCABULARY:,}, {tokens:,} tokens"
    return [within(name, own["peak"] / 2**30, "GiB", naive["peak"] / 2**30, 0.25)]


def naive_bytes(tokens: int) -> int:
    """Memory of the naive way: three tensors in float32, and some reserve."""
    return 3 * 4 * tokens * VOCABULARY + 2 * 2**30


def free_bytes() -> int:
    """Memory available for new processes, minus a reserve for others."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 - 2**30


def measure(way: str, tokens: int) -> dict[str, float]:
    """The peak of added bytes, and the results."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = make_model(device)
    hidden = torch.randn(tokens, DIMS).to(device, model.network.dtype).requires_grad_()
    chosen = torch.randint(VOCABULARY, (tokens,)).to(device)
    temperature = torch.linspace(0.5, 1.5, tokens).to(device)
    before = reset(device)
    logprobs = (naive if way == "naive" else LanguageModel.logprobs)(model, hidden, chosen, temperature)
    logprobs.mean().backward()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else pages("VmHWM")
    assert hidden.grad is not None
    gradient = hidden.grad.float().norm().item()
    return {"peak": peak - before, "logprob": logprobs.mean().item(), "gradient": gradient}


def make_model(device: torch.device) -> LanguageModel:
    """The head, and one layer that is not used."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIMS,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=14,
        num_key_value_heads=2,
        eos_token_id=1,
    )
    network = LlamaForCausalLM(config)
    tokenizer = load(ModelConfig(model=NewModel(characters="abc", max_tokens=8))).tokenizer
    model = ready(network, tokenizer, chat=None)
    if device.type == "cuda":
        nn.Module.to(network, device, torch.bfloat16)
    return model


def naive(model: LanguageModel, hidden: Tensor, chosen: Tensor, temperature: Tensor) -> Tensor:
    """Compute all logits at once."""
    logits = model.logits(hidden) / temperature[:, None]
    return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def reset(device: torch.device) -> int:
    """Reset the peak, and return the bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return pages("VmRSS")


def pages(name: str) -> int:
    """A line of the process's status in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


if __name__ == "__main__":
    main()
