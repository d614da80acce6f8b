"""A model of the size that people train, and what the machine can do for it: for the part `real` of two benchmarks.

The shape is SmolLM2-135M's: 30 layers, hidden 576, 9 heads that share 3 of keys, ffn 1,536, 49,152 tokens. The weights
are random. `python bench/real.py TOKENS [--backward]` is the contestant that computes nothing but the matrix products
of a pass of so many tokens, in the order of the pass, by either of torch's two libraries for them: what a pass would
take if all else took no time. It also reads memory, for the machine's bandwidth.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from bench.harness import Figure, Worker, figure, median
from meshrl_torch.model.text import END, PAD, character_tokenizer

SHAPE: Final = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=END,
    pad_token_id=PAD,
)
CHARACTERS: Final = "".join(map(chr, range(0x20000, 0x20000 + SHAPE.vocab_size - 2)))
"""One for each token but `<pad>` and `<eos>`."""
LIBRARIES: Final = ("mkl", "onednn")
"""What multiplies matrices in torch on CPUs: its default, and the other."""
_AT_ONCE: Final = 1 << 26
"""Most logits in one product, as in meshrl."""
_READ: Final = 1 << 29
"""Bytes that are read for the bandwidth."""

Product = Callable[[Tensor, Tensor], Tensor]
"""Returns `states @ weight.T`."""


def write_model(folder: str) -> None:
    """Write the model to a Hugging Face folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(SHAPE).save_pretrained(folder)
    character_tokenizer(CHARACTERS, SHAPE.max_position_embeddings).save_pretrained(folder)


def matrices() -> list[tuple[int, int]]:
    """The shape [out, in] of each weight in the order of a pass, each layer once, and the head's at the end."""
    hidden, ffn = SHAPE.hidden_size, SHAPE.intermediate_size
    keys = hidden // SHAPE.num_attention_heads * int(SHAPE.num_key_value_heads or 0)
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(ffn, hidden), (ffn, hidden), (hidden, ffn)]
    return [*layer * SHAPE.num_hidden_layers, (SHAPE.vocab_size, hidden)]


def operations(tokens: int, *, backward: bool) -> float:
    """The floating-point operations of a pass in matrix products. Attention's are left out."""
    return (3 if backward else 1) * sum(2.0 * tokens * rows * columns for rows, columns in matrices())


def multiply(product: Product, weights: list[Tensor], states: dict[int, Tensor], *, backward: bool) -> None:
    """Compute the products of a pass: each weight's with states of its width, and with gradients of its results."""
    for weight in weights:
        rows = max(1, _AT_ONCE // len(weight))
        wide = states[len(weight)]
        for part in states[weight.shape[1]].split(rows):
            product(part, weight)
            if backward:
                given = wide[: len(part)]
                product(given, weight.t())
                product(given.t(), part.t())


def command(tokens: int, *, backward: bool) -> list[str]:
    """The command that starts this contestant."""
    return [sys.executable, __file__, str(tokens), *(["--backward"] if backward else [])]


def turn(command: Sequence[str | Path], **question: object) -> dict[str, float]:
    """The second answer of a contestant that runs alone: together they need more memory than many machines have."""
    with Worker(command, 2) as worker:
        first = worker.ask(**question)
        return {**worker.ask(**question), "first": first.get("loss", 0.0)}


def bandwidth(answers: Sequence[Mapping[str, float]]) -> Figure:
    """The speed at which the machine reads memory."""
    return figure("memory, read", median([answer["bandwidth"] / 1e9 for answer in answers]), "GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tokens", type=int)
    parser.add_argument("--backward", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    made = {shape: torch.randn(shape) for shape in set(matrices())}
    weights = [made[shape].clone() for shape in matrices()]
    widths = {width for shape in matrices() for width in shape}
    states = {width: torch.randn(min(options.tokens, _AT_ONCE // width), width) for width in widths}
    memory = torch.ones(_READ // 4)
    fused = cast("Callable[..., Tensor]", torch.ops.mkldnn._linear_pointwise)  # noqa: SLF001 -- no public name
    products: dict[str, Product] = {
        "mkl": linear,
        "onednn": lambda states, weight: fused(states, weight, None, "none", [], ""),
    }
    print('{"ready": true}', flush=True)
    for line in sys.stdin:
        product = products[json.loads(line)["library"]]
        with torch.no_grad():
            began = time.perf_counter()
            multiply(product, weights, states, backward=options.backward)
            wall = time.perf_counter() - began
            began = time.perf_counter()
            memory.sum()
            read = time.perf_counter() - began
        print(json.dumps({"wall": wall, "bandwidth": _READ / read}), flush=True)


if __name__ == "__main__":
    main()
