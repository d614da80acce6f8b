"""Rows that a run keeps to be read: whole groups, with their texts, their numbers, and those of each token."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, cast

import numpy as np

from meshrl import log
from meshrl.data import IMAGES, Batch, Images, Ragged, prompt_text, thumbnail
from meshrl.errors import DataError, DataLost, described
from meshrl.mesh import Array, Rows
from meshrl.roles import ModelConfig, token_reader

Line: TypeAlias = dict[str, object]
Reader: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[str]]]

_ONE: Final = {"rewards": "reward", "groups": "group", "advantages": "advantage"}
"""Names of columns for one row."""
_LEFT_OUT: Final = ("row", "place", "experts", "aborted")
"""Columns that nobody reads as a text or a number."""
_DIGITS: Final = 5
"""Digits after the point of a token's numbers."""


class Samples:
    """Chooses rows of a batch, and writes them as lines of samples.jsonl."""

    def __init__(self, rows: int, tokens: int) -> None:
        """`rows`: of a batch at most. `tokens`: of these rows at most, whose numbers are kept."""
        self._rows = rows
        self._tokens = tokens
        self._reader: Reader | None = None
        self.model: ModelConfig | None = None
        """The role whose tokenizer reads the tokens. None before one is spawned, and once it cannot be read."""

    async def of(self, batch: Batch) -> list[Line]:
        """Return some rows as plain values: texts and numbers by column, and under `tokens` lists with one per token.

        Whole groups are chosen, evenly spread over the batch. Columns that lie on ranks are loaded for these rows
        alone. Rows whose tokens have no more room are kept without them.
        """
        if "groups" in batch:
            batch = await batch.load("groups")
        wanted = batch.only(*(name for name in batch.names if name not in _LEFT_OUT))
        some = await _loaded(wanted.select(_chosen(batch, self._rows)))
        columns = _row_columns(some)
        lines: list[Line] = [{name: column[row] for name, column in columns.items()} for row in range(len(some))]
        if isinstance(images := some.columns.get(IMAGES), Images):
            for line, names in zip(lines, images, strict=True):
                line[IMAGES] = [thumbnail(images.pool[name]) for name in names]
        left, kept = self._tokens, dict[int, Line]()
        for row, line in enumerate(lines):
            found = _token_columns(some, row)
            if not found:
                continue
            line["length"] = length = len(found["tokens"])
            if "advantages" in found and "advantage" not in line:
                line["advantage"] = _mean(found["advantages"], found.get("loss_mask"))
            if length <= left:
                left -= length
                kept[row] = {name: _plain(values) for name, values in found.items()}
        texts = await self._texts([cast("list[int]", each["tokens"]) for each in kept.values()])
        for at, (row, columns_of_row) in enumerate(kept.items()):
            lines[row]["tokens"] = {**({"texts": texts[at]} if texts else {}), **columns_of_row}
        return lines

    async def _texts(self, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[str]]:
        """Return the text of each token, empty if no tokenizer is known."""
        if self.model is None or not rows:
            return ()
        try:
            return await asyncio.to_thread(self._read, self.model, rows)
        except Exception as error:  # noqa: BLE001 -- a tokenizer may raise anything
            log.warning(f"samples.jsonl has tokens without their texts: {described(error)}")
            if self._reader is None:
                self.model = None
            return ()

    def _read(self, model: ModelConfig, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[str]]:
        if self._reader is None:
            self._reader = token_reader(model) or (lambda _: ())
        if (least := min(map(min, rows))) < 0:  # which would count from the end of a list of texts
            raise DataError(f"the batch has a token {least}, which no tokenizer has")
        return self._reader(rows)


async def _loaded(some: Batch) -> Batch:
    """Load all columns. Those that were lost with a rank are left out: the run has no other use for them."""
    try:
        return await some.load()
    except DataLost:
        for name in some.names:
            try:
                some = await some.load(name)
            except DataLost:
                some = some.drop(name)
        return some


def _chosen(batch: Batch, most: int) -> Rows:
    """Return the rows of whole groups, evenly spread. Without groups, each row is one. The last may be cut."""
    if not len(batch):
        return np.arange(0)
    groups = batch.groups if "groups" in batch else np.arange(len(batch))
    numbers, counts = np.unique(groups, return_counts=True)
    wanted = max(1, min(len(numbers), most // int(counts.max())))
    places = np.linspace(0, len(numbers) - 1, wanted).astype(np.int64)
    return np.flatnonzero(np.isin(groups, numbers[places]))[:most]


def _row_columns(some: Batch) -> Mapping[str, Sequence[object]]:
    """Return columns of one text or number for each row, by the name for one row."""
    found: dict[str, Sequence[object]] = {}
    for name, column in some.columns.items():
        if isinstance(column, np.ndarray):
            if column.ndim == 1 and name != "episode":  # a number that begins again when a run resumes
                found[_ONE.get(name, name)] = cast("list[object]", column.tolist())
        elif not isinstance(column, Ragged):
            texts = [*map(prompt_text, column)] if name == "prompt" else column
            if all(text is None or isinstance(text, str) for text in texts):
                found[name] = [text and _writable(cast("str", text)) for text in texts]
    return found


def _writable(text: str) -> str:
    """Write out halves of surrogate pairs, which UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def _token_columns(some: Batch, row: int) -> Mapping[str, Array]:
    """Return the columns of a row with one number for each of its tokens. Empty if it has no tokens.

    Those of an agent's episode are in its conversations, which follow each other.
    """
    episode = some.objects("episode")[row] if "episode" in some and isinstance(some["episode"], tuple) else None
    if isinstance(episode, Batch):
        ragged = {name: column.values for name, column in episode.columns.items() if isinstance(column, Ragged)}
    else:
        ragged = {name: column[row] for name, column in some.columns.items() if isinstance(column, Ragged)}
    length = len(ragged.get("tokens", ()))
    return {name: values for name, values in ragged.items() if length and values.shape == (length,)}


def _mean(values: Array, mask: Array | None) -> float | None:
    """Return the mean over the learned tokens, None if there are none."""
    learned = values if mask is None else values[np.asarray(mask, np.bool_)]
    return float(learned.mean(dtype=np.float64)) if len(learned) else None


def _plain(values: Array) -> list[object]:
    """Return numbers as a short list: flags as 0 and 1, and others rounded."""
    if values.dtype == np.bool_:
        values = values.astype(np.int8)
    if not np.issubdtype(values.dtype, np.integer):
        values = np.round(np.asarray(values, np.float64), _DIGITS)
    return cast("list[object]", values.tolist())
