"""What backends tell about a role before its model loads: operations, memory, lengths of prompts, and vocabulary."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from meshrl import log
from meshrl.data import Batch
from meshrl.errors import ConfigError
from meshrl.mesh import Array, Plan, Planner, Rows, even_plan, make_plan
from meshrl.roles.config import ModelConfig, NewModel, PassConfig, PolicyConfig, RoleConfig
from meshrl.roles.registry import function_of

_UNIT: Final = 1024
"""Parts of a token in which costs are counted."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a model's forward pass. A backward pass takes a multiple of them."""

    per_token: float
    """Of the matrices, for each token."""
    per_pair: float
    """Of attention, for each token and each token that it sees, itself included."""
    per_near_pair: float = 0.0
    """The same in layers in which a token sees only the last `window` tokens."""
    window: int = 0
    """Tokens that a token sees in such layers."""

    def costs(self, lengths: Rows) -> Rows:
        """Return the cost of rows with these lengths, int64[rows], in 1/1024 of the operations `per_token`."""
        costs: Rows = np.rint(_UNIT * (lengths + self._attention(lengths) / self.per_token)).astype(np.int64)
        return costs

    def forward(self, rows: float, length: float) -> float:
        """Return the operations of a forward pass over `rows` rows of `length` tokens, which may be a mean."""
        return rows * (self.per_token * length + float(self._attention(np.array([length]))[0]))

    def _attention(self, lengths: Array) -> NDArray[np.float64]:
        """Operations of attention in rows of these lengths, float64[rows]."""
        own = lengths.astype(np.float64)
        hidden = np.maximum(own - self.window, 0.0)  # tokens that the last one does not see
        pairs = own * (own + 1) / 2
        attention: NDArray[np.float64] = self.per_pair * pairs + self.per_near_pair * (
            pairs - hidden * (hidden + 1) / 2
        )
        return attention


def fair_plan(batch: Batch, parts: int, flops: Flops) -> Plan:
    """Return the row numbers of parts that are balanced by operations.

    The costliest part costs at most as much as in `batch.plan(parts)`, which is returned if it is as good. DataError
    for fewer than one part.
    """
    costs = flops.costs(batch.lengths)
    by_tokens = batch.plan(parts)
    return min(by_tokens, even_plan(costs, parts), key=lambda plan: max(int(costs[rows].sum()) for rows in plan))


def flops_of(config: ModelConfig) -> Flops | None:
    """Count the operations of a role's model. None if its backend counts none. ModelError as in `planner_of`."""
    counts = function_of(config.backend, "FLOPS")
    return None if counts is None else cast("Flops", counts(config))


async def planner_of(config: RoleConfig) -> Planner:
    """Return the function that divides the rows of a role's calls as `balance` says.

    They are divided by tokens if the backend counts no operations. ModelError if the model's configuration cannot be
    read, which may download it first.
    """
    if not isinstance(config, PassConfig) or config.balance == "tokens":
        return make_plan
    if (flops := await asyncio.to_thread(flops_of, config)) is None:
        log.warning("rows are divided by tokens, because the backend counts no operations", backend=config.backend)
        return make_plan
    return partial(_plan, flops)


def _plan(flops: Flops, values: Mapping[str, object], parts: int, owners: Rows | None) -> Plan:
    """Plan a call by the operations of its first batch, unless the caller has chosen the rows' owners."""
    batch = next((value for value in values.values() if isinstance(value, Batch)), None)
    if owners is None and batch is not None:
        owners = np.empty(len(batch), np.int64)
        for part, rows in enumerate(fair_plan(batch, parts, flops)):
            owners[rows] = part
    return make_plan(values, parts, owners)


@dataclass(frozen=True)
class Workload:
    """The work that the ranks of a role must have memory for."""

    axes: Mapping[str, int]
    """The size of each axis of the role's ranks."""
    prompt: int
    """Tokens of the longest prompt."""
    completion: int
    """Tokens of the longest completion."""
    rows: int
    """Rows of one update, or of one call of `generate`, on all ranks together."""
    n: int
    """Number of these rows with the same prompt."""
    gpu: int
    """Bytes of a rank's GPU. 0 if it computes on the CPU."""

    @property
    def tokens(self) -> int:
        """Tokens of the longest row."""
        return self.prompt + self.completion

    @property
    def own_rows(self) -> int:
        """Most rows of one rank along `dp`."""
        return -(-self.rows // self.axes.get("dp", 1))


@dataclass(frozen=True)
class MemoryTerm:
    """One part of a rank's memory."""

    name: str
    nbytes: int
    """Its size in bytes."""
    during: str
    """The call that needs it, such as `update`. "" if it is always held."""
    formula: str
    """How it is computed, as text."""
    host: bool = False
    """True if it is in the host's memory instead of the GPU's."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a role on the rank that needs the most."""

    terms: Sequence[MemoryTerm]
    knobs: Sequence[str] = ()
    """Settings of the role's table that would reduce it, as in `fsdp.cpu_offload=true`."""
    notes: Sequence[str] = ()
    """More information, such as the number of rows of a length that fit."""


def memory_of(config: ModelConfig, work: Workload) -> MemoryEstimate | None:
    """Return the estimate of the role's backend, or None if it has none.

    ConfigError if the axes do not fit, ModelError if the model's configuration cannot be read. It reads no weights.
    """
    estimate = function_of(config.backend, "MEMORY")
    return None if estimate is None else cast("MemoryEstimate", estimate(config, work))


_CHARACTERS_AFTER: Final = ("<pad>", "<eos>")
"""The tokens before the characters in a new model's tokenizer."""


def count_tokens(config: ModelConfig, rows: Batch) -> Sequence[int | str] | None:
    """Count the tokens of each row, or say why it cannot be read. None if unknown.

    A row of a `prompt` alone has those that generation starts with. One with a `completion`, `messages` or `steps` has
    those that the table's role encodes. Reads only the model's tokenizer. Raises ModelError if it cannot be read.
    """
    count = function_of(config.backend, "COUNTS")
    return None if count is None else cast("Sequence[int | str] | None", count(config, rows))


def token_reader(config: ModelConfig) -> Callable[[Sequence[Sequence[int]]], Sequence[Sequence[str]]] | None:
    """Return a function that takes rows of tokens and returns the text of each token. None if the backend has none.

    Reads only the model's tokenizer. Raises ModelError if it cannot be read.
    """
    read = function_of(config.backend, "TEXTS")
    made = None if read is None else read(config)
    return cast("Callable[[Sequence[Sequence[int]]], Sequence[Sequence[str]]] | None", made)


def check_teacher(policy: PolicyConfig, teacher: ModelConfig) -> None:
    """Check a teacher: raise ConfigError if it is the policy's model, or if its tokens differ from the policy's.

    Reads the `tokenizer.json` of local folders before any model loads. Models without one, such as .gguf files, are not
    checked.
    """
    if policy.model == teacher.model:
        raise ConfigError(
            f"the teacher's model, {_named(teacher.model)}, is the policy's model, so there is nothing to learn from "
            "it: name the folder of a better model"
        )
    own, other = _vocabulary(policy.model), _vocabulary(teacher.model)
    if own is None or other is None:
        return
    different = sorted((token for token in own if other.get(token) != own[token]), key=own.__getitem__)
    if different or len(own) != len(other):
        token = different[0] if different else next(token for token in other if token not in own)
        raise ConfigError(
            f"the teacher's model, {_named(teacher.model)}, has other tokens than the policy's, "
            f"{_named(policy.model)}: {token!r} is token {own.get(token, 'none')} of the policy and "
            f"{other.get(token, 'none')} of the teacher ({len(own)} and {len(other)} tokens, {len(different)} of the "
            "policy's differ). A teacher reads the policy's tokens, so choose a model of the same family"
        )


def _named(model: str | NewModel) -> str:
    return repr(model) if isinstance(model, str) else "a new one"


def _vocabulary(model: str | NewModel) -> Mapping[str, int] | None:
    """Return the number of each token, or None if it cannot be read here."""
    if isinstance(model, NewModel):
        return {token: number for number, token in enumerate((*_CHARACTERS_AFTER, *model.characters))}
    file = Path(model).expanduser() / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        table = cast("dict[str, Any]", json.loads(file.read_bytes()))
        pieces = table["model"]["vocab"]
        numbered = pieces if isinstance(pieces, dict) else {piece[0]: number for number, piece in enumerate(pieces)}
        added = {token["content"]: token["id"] for token in table.get("added_tokens", ())}
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: is not a readable tokenizer: {type(error).__name__}: {error}") from error
    return {**cast("dict[str, int]", numbered), **added}
