"""Rows that a run kept: what a page shows of all, and for which of them it has the tokens."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

import msgspec

from meshrl.observe.run_files import TOKENS, Line
from meshrl.tags import without_special

T = TypeVar("T")
ROWS: Final = 10_000
"""Rows on a page at most."""
_TEXT: Final = 4000
"""Characters of a text at most."""
_LEAST: Final = 250
"""A text is not cut further than to this many characters."""
_TEXTS: Final = 1 << 21
"""Characters of all texts of a page at most. Beyond it, long ones are cut."""
IMAGES: Final = "images"
"""The key of a sample with its small images, as data URLs."""
MOST_IMAGES: Final = 1 << 22
"""Characters of all small images of a page at most. Beyond it, rows of some steps are without theirs."""
MOST_TOKENS: Final = 1 << 24
"""Bytes of tokens in one file at most."""


def head_of(sample: Line, at: int) -> Line:
    """Return what lists show of a row. `at`: its number in the file. `tokens` says whether the file has them."""
    head = {name: shortened(value) if isinstance(value, str) else value for name, value in sample.items()}
    return {**head, "at": at, TOKENS: TOKENS in sample}  # ours last: a batch may have a column of this name


def shortened(text: str, most: int = _TEXT) -> str:
    """Cut a long text, without its special tokens, and add its length."""
    text = without_special(text)
    return f"{text[:most]} … ({len(text):,} characters)" if len(text) > most else text


def shown_rows(heads: Sequence[Line], notes: list[str]) -> list[Line]:
    """Return the heads of at most `ROWS` rows, of evenly spread steps, with texts that are cut if there are many."""
    rows = spread(heads, lambda head: (str(head.get("step")), 1), ROWS)
    if len(rows) < len(heads):
        notes.append(f"{len(rows):,} of {len(heads):,} samples are shown.")
    rows = _with_images(rows, notes)
    sizes = [len(value) for head in rows for value in head.values() if isinstance(value, str)]
    most = _TEXT
    while most > _LEAST and sum(min(size, most) for size in sizes) > _TEXTS:
        most //= 2
    if most == _TEXT:
        return rows
    notes.append(f"Texts of samples are cut after {most:,} characters, because there are many.")
    return [{name: _cut(value, most) for name, value in head.items()} for head in rows]


def _with_images(rows: list[Line], notes: list[str]) -> list[Line]:
    """Return the rows, those of evenly spread steps with their images, as many as a page may have."""
    sizes = [
        (str(head.get("step")), at, len(msgspec.json.encode(head[IMAGES])))
        for at, head in enumerate(rows)
        if head.get(IMAGES)
    ]
    kept = {at for _, at, _ in spread(sizes, lambda row: (row[0], row[2]), MOST_IMAGES)}
    if len(kept) == len(sizes):
        return rows
    notes.append(f"{len(kept):,} of {len(sizes):,} rows with images are shown with them.")
    left_out = {at for _, at, _ in sizes} - kept
    return [
        {name: value for name, value in head.items() if name != IMAGES} if at in left_out else head
        for at, head in enumerate(rows)
    ]


def _cut(value: object, most: int) -> object:
    return f"{value[:most]} …" if isinstance(value, str) and len(value) > most else value


def tokens_within(samples: Sequence[Line], heads: Sequence[Line], notes: list[str]) -> dict[int, msgspec.Raw]:
    """Return the tokens of the rows with these heads by number, of evenly spread steps, as many as a file may have."""
    places = [cast("int", head["at"]) for head in heads if head[TOKENS]]
    found = [(str(samples[at].get("step")), at, cast("msgspec.Raw", samples[at][TOKENS])) for at in places]
    kept = spread(found, lambda row: (row[0], len(bytes(row[2]))), MOST_TOKENS)
    if len(kept) < len(found):
        notes.append(f"{len(kept):,} of {len(found):,} rows are here with their tokens; `meshrl watch` shows all.")
    return {at: tokens for _, at, tokens in kept}


def spread(rows: Sequence[T], measure: Callable[[T], tuple[str, int]], most: int) -> list[T]:
    """Return rows of evenly spread steps, the last one among them, whose sizes add up to at most `most`.

    `measure`: step and size of a row. If the last step alone is larger, it is cut.
    """
    measures = [measure(row) for row in rows]
    steps = list(dict.fromkeys(step for step, _ in measures))
    apart = 1
    while True:
        wanted = set(steps[::-1][::apart])
        size = sum(own for step, own in measures if step in wanted)
        if size <= most or len(wanted) <= 1:
            break
        apart *= 2
    kept: list[T] = []
    for row, (step, own) in zip(rows, measures, strict=True):
        if step in wanted and own <= most:
            kept.append(row)
            most -= own
    return kept
