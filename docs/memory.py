"""The table of docs/gpu.md that tells the memory of large models: `python docs/memory.py`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from meshrl.roles import PolicyConfig, Workload, memory_of

PAGE: Final = Path(__file__).with_name("gpu.md")
MODELS: Final = Path(__file__).parents[1] / "tests" / "data" / "models"
ASKED: Final = [(model, ranks) for model in ("llama-8b", "llama-70b") for ranks in (8, 64)]
FORMULAS: Final = {
    "parameters": "4 P / S",
    "moments": "8 P / S",
    "gradients": "4 P / S",
    "gathered": "2 (2 V h + h)",
    "activations": "2 h T for each layer, and 2 bytes of a layer's parameters",
    "logits": "a chunk's of 2**26, in float32 and 2 bytes, and the head's gradient",
    "reduction": "(6 + 12 / S) (2 V h + h)",
    "workspace": "the rest: a layer's recomputed states, gradients and whole parameters",
}
"""By term. P parameters, S ranks, V tokens of the vocabulary, h dims of the states, T tokens of a micro-batch."""
_GIB: Final = 2**30


def told(model: str, ranks: int) -> Mapping[str, int]:
    """Bytes of each term of an FSDP2 policy in bfloat16, whose layers are recomputed."""
    config = PolicyConfig(
        model=str(MODELS / model),
        backend="fsdp",
        dtype="bfloat16",
        activation_checkpointing=True,
        micro_batch_tokens=16384,
    )
    work = Workload({"dp": ranks}, prompt=512, completion=2048, rows=1024, n=8, gpu=80 * _GIB)
    memory = memory_of(config, work)
    return {term.name: term.nbytes for term in memory.terms} if memory else {}


def rows() -> Iterator[str]:
    """Of the table."""
    columns = [told(*asked) for asked in ASKED]
    yield f"| GiB of a rank | {' | '.join(f'{model}, {ranks} ranks' for model, ranks in ASKED)} | |"
    yield "|---|---:|---:|---:|---:|---|"
    for name, formula in FORMULAS.items():
        yield f"| {name} | {' | '.join(f'{column[name] / _GIB:.2f}' for column in columns)} | {formula} |"
    yield f"| all | {' | '.join(f'{sum(column.values()) / _GIB:.2f}' for column in columns)} | |"


def written() -> str:
    """The page with the table as it is told now."""
    table = "\n".join(rows())
    return re.sub(
        r"<!-- told -->\n.*?<!-- /told -->",
        lambda _: f"<!-- told -->\n{table}\n<!-- /told -->",
        PAGE.read_text("utf-8"),
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    PAGE.write_text(written(), "utf-8")
