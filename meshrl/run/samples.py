"""Rows that a run keeps to be read: whole groups, with their texts, their numbers, and those of each token."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, cast

import msgspec
import numpy as np

from meshrl import log
from meshrl.data import IMAGES, Batch, Column, Images, Ragged, RemoteColumn, is_ragged, prompt_text, thumbnail
from meshrl.errors import DataError, DataLost, described
from meshrl.mesh import Array, Rows
from meshrl.roles import ModelConfig, token_reader

Line: TypeAlias = dict[str, object]
Reader: TypeAlias = Callable[[Sequence[Sequence[int]]], Sequence[Sequence[str]]]
_TokenColumns: TypeAlias = Mapping[str, Array]

_ONE: Final = {"rewards": "reward", "groups": "group", "advantages": "advantage"}
"""Names of columns for one row."""
_AVERAGED: Final = ("advantages", "loss_mask")
"""Columns of tokens from which a row's mean advantage follows."""
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
        alone, and those of tokens for the rows that have room for them. Other rows are kept without them. The lists are
        JSON already, because they are long: another thread writes them.
        """
        if "groups" in batch:
            batch = await batch.load("groups")
        wanted = batch.only(*(name for name in batch.names if name not in _LEFT_OUT and _is_flat(batch.stored[name])))
        some = wanted.select(_chosen(batch, self._rows))
        by_token = [name for name in some.names if is_ragged(some.stored[name])]
        rows = some.drop(*by_token)
        rows = await _loaded(rows, rows.names)
        columns = _row_columns(rows)
        lines: list[Line] = [{name: column[row] for name, column in columns.items()} for row in range(len(rows))]
        if isinstance(images := rows.columns.get(IMAGES), Images):
            for line, small in zip(lines, await asyncio.to_thread(thumbnails, images), strict=True):
                line[IMAGES] = small
        kept = await self._with_room(lines, rows, some.only(*by_token))
        if kept:
            for row, json in zip(kept, await asyncio.to_thread(self._encoded, [*kept.values()]), strict=True):
                lines[row]["tokens"] = json
        return lines

    async def _with_room(self, lines: Sequence[Line], rows: Batch, tokens: Batch) -> dict[int, _TokenColumns]:
        """Return the columns of tokens, by row, of those that have room. Adds lengths and mean advantages to all lines.

        `rows`: the other columns. Those of an agent's episode are there, and all others in `tokens`.
        """
        if episodes := _of_episodes(rows):
            found, lengths = episodes, [len(each.get("tokens", ())) for each in episodes]
        else:
            early = [name for name in _AVERAGED if name in tokens and "advantages" in tokens]
            tokens = await _loaded(tokens, early)
            found = _of_rows(tokens.only(*(name for name in early if name in tokens)))
            lengths = tokens.lengths.tolist() if "tokens" in tokens else [0] * len(lines)
        left, fitting = self._tokens, list[int]()
        for row, (line, length) in enumerate(zip(lines, lengths, strict=True)):
            if length:
                line["length"] = length
                averaged = _of_length(found[row], length)
                if "advantages" in averaged and "advantage" not in line:
                    line["advantage"] = _mean(averaged["advantages"], averaged.get("loss_mask"))
                if length <= left:
                    left -= length
                    fitting.append(row)
        if not fitting:
            return {}
        few = tokens.select(fitting)
        chosen = [episodes[row] for row in fitting] if episodes else _of_rows(await _loaded(few, few.names))
        pairs = zip(fitting, chosen, strict=True)
        return {row: _of_length(each, lengths[row]) for row, each in pairs if "tokens" in each}

    def _encoded(self, rows: Sequence[_TokenColumns]) -> list[msgspec.Raw]:
        """Return the columns of rows as JSON, with the text of each token."""
        plain = [{name: _plain(values) for name, values in columns.items()} for columns in rows]
        texts = self._texts([cast("list[int]", each["tokens"]) for each in plain])
        listed = [{**each, "texts": own} for own, each in zip(texts, plain, strict=True)] if texts else plain
        return [msgspec.Raw(msgspec.json.encode(each)) for each in listed]

    def _texts(self, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[str]]:
        """Return the text of each token, empty if no tokenizer is known or one of them has no text."""
        if self.model is None:
            return ()
        try:
            if self._reader is None:
                self._reader = token_reader(self.model) or (lambda _: ())
            if (least := min(map(min, rows))) < 0:  # which would count from the end of a list of texts
                raise DataError(f"the batch has a token {least}, which no tokenizer has")
            return self._reader(rows)
        except Exception as error:  # noqa: BLE001 -- a tokenizer may raise anything
            log.warning(f"samples.jsonl has tokens without their texts: {described(error)}")
            if self._reader is None:
                self.model = None
            return ()


async def _loaded(some: Batch, names: Sequence[str]) -> Batch:
    """Load these columns. Those that were lost with a rank are left out: the run has no other use for them."""
    if not names:
        return some
    try:
        return await some.load(*names)
    except DataLost:
        for name in names:
            try:
                some = await some.load(name)
            except DataLost:
                some = some.drop(name)
        return some


def _is_flat(column: Column | RemoteColumn) -> bool:
    """True for texts and for one number for each row or token. Others, such as top-k log-probs, are not shown."""
    if isinstance(column, RemoteColumn):
        return not column.form.shape
    values = column.values if isinstance(column, Ragged) else column
    return not isinstance(values, np.ndarray) or values.ndim == 1


def thumbnails(images: Images) -> list[list[str]]:
    """Return a small copy of each row's images, as data URLs."""
    return [[thumbnail(images.pool[name]) for name in names] for names in images]


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


def _of_episodes(rows: Batch) -> list[_TokenColumns]:
    """Return the columns of tokens of agents' episodes: of their conversations, which follow each other.

    Empty if the rows are none.
    """
    if not isinstance(rows.columns.get("episode"), tuple):
        return []
    episodes = rows.objects("episode")
    if not any(isinstance(each, Batch) for each in episodes):
        return []
    return [
        {name: column.values for name, column in each.columns.items() if isinstance(column, Ragged)}
        if isinstance(each, Batch)
        else {}
        for each in episodes
    ]


def _of_rows(tokens: Batch) -> list[_TokenColumns]:
    ragged = {name: column for name, column in tokens.columns.items() if isinstance(column, Ragged)}
    return [{name: column[row] for name, column in ragged.items()} for row in range(len(tokens))]


def _of_length(columns: _TokenColumns, length: int) -> _TokenColumns:
    """Return the columns with one number for each token."""
    return {name: values for name, values in columns.items() if values.shape == (length,)}


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
