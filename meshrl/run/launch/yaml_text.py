"""Write plain values as YAML, in which scripts are easier to read than in JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast


def yaml_text(value: object, indent: str = "") -> str:
    """Write mappings, sequences, texts, numbers and booleans. A text of several lines becomes a block."""
    if isinstance(value, Mapping) and value:
        pairs = cast("Mapping[str, object]", value).items()
        return "".join(f"{indent}{_scalar(key) if _odd(key) else key}:{_after(each, indent)}" for key, each in pairs)
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return "".join(f"{indent}-{_after(each, indent)}" for each in cast("Sequence[object]", value))
    return f"{indent}{_scalar(value)}\n"


def _after(value: object, indent: str) -> str:
    """Write a value that follows a key or a dash."""
    inner = indent + "  "
    if isinstance(value, str) and _is_block(value):
        lines = value.split("\n")[:-1]
        return " |\n" + "".join(f"{inner}{line}\n" if line else "\n" for line in lines)
    if value and isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return "\n" + yaml_text(cast("object", value), inner)
    return f" {_scalar(value)}\n"


def _scalar(value: object) -> str:
    """Write a scalar as JSON, except characters with two escapes there, which YAML does not join."""
    if not isinstance(value, str):
        return json.dumps(value)
    letters = (json.dumps(each)[1:-1] if ord(each) < 1 << 16 else f"\\U{ord(each):08x}" for each in value)
    return f'"{"".join(letters)}"'


def _odd(key: str) -> bool:
    """True if YAML might not read the key as text."""
    return not re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]{3,}", key) or key.lower() in ("true", "false", "null")


def _is_block(text: str) -> bool:
    """True if YAML reads the text back unchanged as a block."""
    lines = text.split("\n")
    plain = all(line.isprintable() and line == line.rstrip() for line in lines)
    return len(lines) > 2 and not lines[-1] and bool(lines[-2]) and plain and not text.startswith((" ", "\n"))
