"""The reference of events: the lines of events.jsonl, of the structs that write them."""

import ast
import inspect
from itertools import pairwise

import msgspec

from meshrl import events

PAGE = "reference/events.md"


def pages() -> dict[str, str]:
    """The text of the page, by its path in the site."""
    kinds = [
        (name, kind)
        for name, kind in vars(events).items()
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind.__struct_config__.tag
    ]
    said = (inspect.getdoc(events) or "").partition("\n\n")[2]
    rows = "\n".join(f"| [`{kind.__struct_config__.tag}`](#{name.lower()}) | {_first(kind)} |" for name, kind in kinds)
    head = f"""# Events

Look up what the lines of a run's `events.jsonl` mean. Each line is a JSON object, whose `kind` says which. {said}

| `kind` | What happened |
|---|---|
{rows}
"""
    return {PAGE: head + "".join(_kind(name, kind) for name, kind in kinds)}


def _first(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _kind(name: str, kind: type[msgspec.Struct]) -> str:
    said = _meanings(name)
    parts = [f'\n## {name}\n\n`"kind": "{kind.__struct_config__.tag}"`\n\n{inspect.getdoc(kind)}\n\n']
    for field in msgspec.structs.fields(kind):
        optional = "" if field.required else "; may be left out"
        shown = getattr(field.type, "__name__", None) if isinstance(field.type, type) else None
        typed = (shown or str(field.type)).replace("|", "or")
        parts.append(
            f"`{field.encode_name}` <small>{typed}{optional}</small>\n"
            f":   {said.get(field.name) or 'As its name says.'}\n\n"
        )
    return "".join(parts)


def _meanings(name: str) -> dict[str, str]:
    body = next(
        node.body
        for node in ast.parse(inspect.getsource(events)).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {
        key.target.id: inspect.cleandoc(after.value.value)
        for key, after in pairwise(body)
        if isinstance(key, ast.AnnAssign)
        and isinstance(key.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }
