"""Write plain values as YAML. JSON would be valid too, but is hard to read for scripts."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast


def yaml_text(value: object, indent: str = "") -> str:
    """Mappings, sequences, texts, numbers and truths, with texts of several lines as such."""
    if isinstance(value, Mapping) and value:
        pairs = cast("Mapping[str, object]", value).items()
        return "".join(f"{indent}{_scalar(key) if _odd(key) else key}:{_after(each, indent)}" for key, each in pairs)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return "".join(f"{indent}-{_after(each, indent)}" for each in cast("Sequence[object]", value))
    return f"{indent}{_scalar(value)}\n"


def _after(value: object, indent: str) -> str:
    """A value after the key or the dash that has it."""
    inner = indent + "  "
    if isinstance(value, str) and _is_block(value):
        lines = value.split("\n")[:-1]
        return " |\n" + "".join(f"{inner}{line}\n" if line else "\n" for line in lines)
    if value and isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return "\n" + yaml_text(cast("object", value), inner)
    return f" {_scalar(value)}\n"


def _scalar(value: object) -> str:
    """As JSON has it, but for letters that take two escapes there, which YAML does not join."""
    if not isinstance(value, str):
        return json.dumps(value)
    letters = (json.dumps(each)[1:-1] if ord(each) < 1 << 16 else f"\\U{ord(each):08x}" for each in value)
    return f'"{"".join(letters)}"'


def _odd(key: str) -> bool:
    """Whether YAML might read something else than a text."""
    return not re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]{3,}", key) or key.lower() in ("true", "false", "null")


def _is_block(text: str) -> bool:
    """Whether YAML reads it back as it is, line by line."""
    lines = text.split("\n")
    plain = all(line.isprintable() and line == line.rstrip() for line in lines)
    return len(lines) > 2 and not lines[-1] and bool(lines[-2]) and plain and not text.startswith((" ", "\n"))
