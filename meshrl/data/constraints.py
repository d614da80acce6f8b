"""Constraints on what a model writes: a JSON schema, a regular expression or choices, and the columns that have them.

A row's `constraint` holds for the answer that is to be drawn. Its `masked` says which tokens were drawn under which
constraint, so that a trainer masks the same logits: the log-probs of such tokens are those under the mask.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from meshrl.data.batch import Batch
from meshrl.errors import DataError

CONSTRAINT: Final = "constraint"
"""The column, `Constraint.text` or None by row."""
MASKED: Final = "masked"
"""The column, `masked_text` by row, or None if no token was masked."""
UNREPEATED: Final = ""
"""Stands for a mask that only the engine knows which drew the token."""
Masks: TypeAlias = Literal["none", "plain", "served", "trained"]
"""What a backend's masks can do. `plain`: hold an answer to one schema, expression or list of choices. `served`: to any
constraint. `trained`: its log-probs are those under a mask that other backends of this kind repeat."""


class Branch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One form of an answer: a text before it, its content by one of the fields, and a text after it."""

    schema: Mapping[str, Any] | bool | None = None
    """A JSON schema."""
    regex: str | None = None
    choices: tuple[str, ...] = ()
    without: str | None = None
    """An expression that a free text has no match of."""
    parts: tuple["Branch", ...] | None = None
    """Forms one after another."""
    begin: str = ""
    end: str = ""
    is_optional: bool = False
    """True for one of `parts` that may be left out."""


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer may be: one of its branches, perhaps after a thought."""

    branches: tuple[Branch, ...]
    thought: str = ""
    """The tag that ends a thought, which has no constraint. Empty if the answer has none."""

    @property
    def text(self) -> str:
        """Its JSON. Properties of schemas keep their order, in which the model writes them."""
        return msgspec.json.encode(self).decode()

    @property
    def is_plain(self) -> bool:
        """True if it is one schema, expression or list of choices, and nothing else."""
        first = self.branches[0]
        is_one = len(self.branches) == 1 and first.without is None and first.parts is None
        return is_one and not (self.thought or first.begin or first.end)


def read_constraint(text: object, where: str) -> Constraint:
    """Read `Constraint.text`. Raises DataError that names `where` for another text, and a branch without a content."""
    try:
        read = msgspec.json.decode(str(text), type=Constraint)
    except msgspec.MsgspecError as error:
        raise DataError(f"{where} has a `{CONSTRAINT}` that is not the text of one: {error}") from error
    inner = [part for branch in read.branches for part in branch.parts or ()]
    if not read.branches or any(_contents(branch) != 1 for branch in (*read.branches, *inner)):
        raise DataError(
            f"{where} has a `{CONSTRAINT}` without one of schema, regex, choices, without and parts in each branch: "
            f"{text}"
        )
    return read


def _contents(branch: Branch) -> int:
    given = branch.schema, branch.regex, branch.choices or None, branch.without, branch.parts
    return sum(each is not None for each in given)


Span: TypeAlias = tuple[int, int, str]
"""The first token of a row that was drawn under a mask, the one after the last, and `Constraint.text` or UNREPEATED."""


def masked_text(spans: Sequence[Span]) -> str | None:
    """The spans of a row as its column has them."""
    return json.dumps([list(span) for span in spans]) if spans else None


def masked_spans(batch: Batch) -> Sequence[Sequence[Span]]:
    """Return the spans of each row that were drawn under a mask. DataError if the column is not one of them."""
    if MASKED not in batch:
        return [()] * len(batch)
    found = list[Sequence[Span]]()
    for row, text in enumerate(batch.objects(MASKED)):
        try:
            found.append(() if text is None else msgspec.json.decode(str(text), type=list[Span]))
        except msgspec.MsgspecError as error:
            raise DataError(f"`{MASKED}` of {batch.place(row)} has no spans of tokens: {error}") from error
    return found
