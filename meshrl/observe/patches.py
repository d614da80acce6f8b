"""The difference of two plain values, as a patch that a browser applies (`applied` in live.js).

A patch of a table is a table with the patches of its keys. A patch of a list of tables whose length stays the same is a
table with the patches of its places. All other patches are lists: [value] replaces the value. [drop, keep, more]
removes the first `drop` elements of a list, keeps the `keep` that follow, and adds `more`.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias, cast

Patch: TypeAlias = Mapping[str, object] | Sequence[object]
Table: TypeAlias = Mapping[str, object]

SAME: Final = None
"""No patch: nothing changed."""


def difference(old: object, new: object) -> Patch | None:
    """Return the patch that turns `old` into `new`. SAME if they are equal."""
    return _difference(old, new, 0)[0]


def _difference(old: object, new: object, shifted: int) -> tuple[Patch | None, int]:
    """Return the patch, and the shift of a list in elements. `shifted`: that of the previous list, tried first."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return _of_tables(cast("Table", old), cast("Table", new)), shifted
    if isinstance(old, list) and isinstance(new, list):
        return _of_lists(cast("list[object]", old), cast("list[object]", new), shifted)
    return (SAME if old == new else [new]), shifted


def _of_tables(old: Table, new: Table) -> Patch | None:
    patches: dict[str, object] = {}
    shifted = 0
    for key, value in new.items():
        patch, shifted = _difference(old[key], value, shifted)
        if patch is not SAME:
            patches[key] = patch
    return patches or SAME


def _of_lists(old: list[object], new: list[object], shifted: int) -> tuple[Patch | None, int]:
    if old == new:
        return SAME, 0
    if not old or not new:
        return [new], 0
    drop, keep = _kept(old, new, shifted)
    if not drop and len(old) == len(new) and all(isinstance(each, dict) for each in (*old, *new)):
        places = {str(at): _difference(*pair, 0)[0] for at, pair in enumerate(zip(old, new, strict=True))}
        return {at: patch for at, patch in places.items() if patch is not SAME}, 0
    return ([drop, keep, new[keep:]] if keep else [new]), drop


def _kept(old: list[object], new: list[object], shifted: int) -> tuple[int, int]:
    """Return how many elements to drop and how many to keep, such that most are kept."""
    drops = {0, min(shifted, len(old)), old.index(new[0]) if new[0] in old else 0}
    return max(((drop, _common(old, new, drop)) for drop in drops), key=lambda pair: pair[1])


def _common(old: list[object], new: list[object], drop: int) -> int:
    """Count the equal elements from there on."""
    most = min(len(old) - drop, len(new))
    if old[drop : drop + most] == new[:most]:
        return most
    return next(at for at in range(most) if old[drop + at] != new[at])
