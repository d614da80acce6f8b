"""Inputs of the checks: a model with distinct log-probs, and batches of rows of many shapes."""

import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from safetensors.numpy import load_file, save_file

from meshrl.algo import BradleyTerryLoss, ClippedLoss, score_columns
from meshrl.data import Batch, Metrics, Ragged, Source
from meshrl.mesh import Array, stop
from meshrl.roles import NewModel, Policy, PolicyConfig, RewardModel

SMALL: Final = NewModel(characters="abcdefgh>", hidden_size=16, ffn_size=24, layers=2, heads=2, max_tokens=48)
"""11 tokens: an odd number, which ranks cannot divide evenly."""

LOSS: Final = ClippedLoss()

TEXTS: Final = ("abc>", "h", "gfedcba>", "")
"""Texts in the characters of `SMALL`."""

SAMPLED: Final = NewModel(characters="abcdefgh>", hidden_size=64, ffn_size=96, layers=2, heads=2, max_tokens=320)
"""The model for samplers: heads of 32 dims, as fused kernels need, and room for prompts of several cache blocks."""

SLOTS: Final = 4
"""Slots of a sampler: few, so that rows wait."""

_SPREAD: Final = 8.0
"""Factor for the matrices of a new model. Without it, all log-probs are almost equal."""


PAIRS: Final = Batch.of(
    prompt=[text for text in ("abc>", "h>", "gfe>", "abc>", "d>") for _ in range(2)],
    completion=["cba", "abc", "h", "", "efggggggggg", "gfe", "ccc", "cba", "d", "d"],
    answer=[text for text in ("cba", "h", "efg", "cba", "d") for _ in range(2)],
    groups=np.repeat(np.arange(5), 2),
    preferred=np.array([1, -1, 1, -1, -1, 1, -1, 1, 0, 0], np.int8),
    least_margins=np.repeat(np.array([0, 1, 0.5, 0, 0], np.float32), 2),
)
"""Rows of a reward model: two pairs of one prompt, and one pair without a preference."""

STEPS: Final = Batch.of(
    prompt=["abc>", "h>", "abc>"],
    steps=[("c", "ba"), ("h",), ("cb", "a", "ggggggg")],
    step_labels=[(1.0, 0.0), (1.0,), (1.0, 0.5, 0.0)],
)
"""Rows of a reward model with a label for each step."""


@dataclass(frozen=True)
class ModelFolders:
    """A Hugging Face folder with which the roles of both sides begin."""

    folder: str
    valued: str
    """The same model with a value head, for critics."""
    vocabulary: int
    longest: int
    """Longest row in tokens."""


@dataclass(frozen=True)
class ModelPair:
    """Two models of one shape with different weights: the one a sampler begins with, and the one it loads."""

    old: str
    """A Hugging Face folder. `new` is another."""
    new: str
    vocabulary: int
    end: int
    """The token that ends a completion."""


Spawn: TypeAlias = Callable[[PolicyConfig], Awaitable[Policy]]


async def prepare(spawn: Spawn, place: Path, given: str | None) -> ModelFolders:
    """Prepare the folders of a trial's model below `place`. Without `given`, `spawn` makes a new model."""
    folder = Path(given) if given else place / "model"
    if given is None:
        await _make(spawn, folder, PolicyConfig(model=SMALL))
    config = json.loads((folder / "config.json").read_bytes())
    valued = place / "valued"
    shutil.copytree(folder, valued)
    generator = np.random.default_rng(5)
    head = {
        "weight": (generator.normal(size=(1, config["hidden_size"])) / 4).astype(np.float32),
        "bias": np.full(1, 0.1, np.float32),
    }
    save_file(head, valued / "value_head.safetensors")
    return ModelFolders(str(folder), str(valued), config["vocab_size"], config["max_position_embeddings"])


async def prepare_pair(spawn: Spawn, place: Path, tied: bool) -> ModelPair:
    """Prepare the folders of two new models below `place`. `tied`: the head is the embeddings."""
    folders = [place / name for name in ("old", "new")]
    for seed, folder in enumerate(folders):
        await _make(spawn, folder, PolicyConfig(model=SAMPLED, seed=seed))
        if not tied:
            _untie(folder, seed)
    config = json.loads((folders[0] / "config.json").read_bytes())
    old, new = map(str, folders)
    return ModelPair(old, new, config["vocab_size"], config["eos_token_id"])


async def _make(spawn: Spawn, folder: Path, config: PolicyConfig) -> None:
    policy = await spawn(config)
    await policy.save(str(folder))
    await stop(policy)
    tensors = tensors_of(folder)
    matrices = {name: array for name, array in tensors.items() if array.ndim == 2}
    wide = {name: np.multiply(array, _SPREAD, dtype=np.float32) for name, array in matrices.items()}
    save_file({**tensors, **wide}, folder / "model.safetensors", {"format": "pt"})


def _untie(folder: Path, seed: int) -> None:
    """Give the model a separate head."""
    tensors = tensors_of(folder)
    shape = tensors["model.embed_tokens.weight"].shape
    head = (np.random.default_rng((seed, 3)).normal(size=shape) / 6).astype(np.float32)
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}), "utf-8")


def tensors_of(folder: Path) -> dict[str, Array]:
    """All tensors of a saved model. Those of its value head are under `value_head`."""
    tensors: dict[str, Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        prefix = "value_head." if file.stem == "value_head" else ""
        tensors |= {prefix + name: array for name, array in load_file(file).items()}
    return tensors


def rollouts(model: ModelFolders, rows: int, seed: int) -> Batch:
    """Rows with four prompts of 1 to 8 tokens and completions of 1 to 9. Every third has a gap that is not learned."""
    generator = np.random.default_rng(seed)
    heads = [generator.integers(2, model.vocabulary, generator.integers(1, 9)) for _ in range(4)]
    pairs = [
        (heads[generator.integers(4)], generator.integers(1, model.vocabulary, generator.integers(1, 10)))
        for _ in range(rows)
    ]
    masks = [np.arange(len(head) + len(tail)) >= len(head) for head, tail in pairs]
    for mask in masks[::3]:
        mask[-3:-1] = False
    return Batch.of(
        tokens=Ragged.of([np.concatenate(pair) for pair in pairs], np.int32),
        loss_mask=Ragged.of(masks, np.bool_),
        rewards=generator.normal(size=rows).astype(np.float32),
        advantages=generator.normal(size=rows).astype(np.float32),
        temperature=generator.choice(np.array([0.7, 1.0, 1.3], np.float32), rows),
        margins=generator.normal(size=rows).astype(np.float32),
        preferred=generator.choice(np.array([1, -1], np.int8), rows),
    )


def by_hand(model: ModelFolders, lengths: list[tuple[int, int]], seed: int = 0) -> Batch:
    """A row for each pair of lengths: all tokens, and how many of the last are learned."""
    generator = np.random.default_rng(seed)
    tokens = Ragged.of([generator.integers(2, model.vocabulary, length) for length, _ in lengths], np.int32)
    masks = [np.arange(length) >= length - learned for length, learned in lengths]
    numbers = generator.normal(size=(2, len(lengths))).astype(np.float32)
    batch = Batch.of(tokens=tokens, loss_mask=Ragged.of(masks, np.bool_), rewards=numbers[0], advantages=numbers[1])
    zeros = Ragged(np.full(len(tokens.values), -2, np.float32), tokens.offsets, source=Source.trainer(0))
    return with_logprobs(batch.assign(logprobs=zeros), seed)


async def learned_pairs(model: RewardModel, batch: Batch, loss: BradleyTerryLoss) -> Metrics:
    """Score pairs and update a reward model on them."""
    return await model.update(await score_columns(await model.token_scores(await model.encode(batch))), loss)


def with_logprobs(scored: Batch, seed: int) -> Batch:
    """Add the trainer's `logprobs`, and similar ones of the sampler and the reference. Some ratios are clipped."""
    logprobs = scored.ragged("logprobs")
    noise = np.random.default_rng((seed, 1)).normal(0, 0.2, (2, len(logprobs.values))).astype(np.float32)
    return scored.assign(
        sampler_logprobs=Ragged(logprobs.values + noise[0], logprobs.offsets, source=Source("sampler")),
        reference_logprobs=Ragged(logprobs.values + noise[1], logprobs.offsets, source=Source("reference")),
    )


def with_returns(batch: Batch, seed: int) -> Batch:
    """Add `values` and `returns` by token, which a critic's update reads.

    Old values are above 1 in size, so the difference to a value within half of that size has no rounding error. Whether
    a value is clipped, with a bound of at most 1/2, then does not depend on the order of sums.
    """
    offsets = batch.tokens.offsets
    numbers = np.random.default_rng((seed, 2)).normal(size=(2, len(batch.tokens.values))).astype(np.float32)
    values = numbers[0] + np.copysign(np.float32(1), numbers[0])
    return batch.assign(values=Ragged(values, offsets), returns=Ragged(numbers[1], offsets))
