"""Tags in a model's text: special tokens by name, and tags that a prompt leaves open."""

import re
from typing import Final

_SPECIAL: Final = re.compile(r"<([|\uff5c])[^<>|\uff5c\s]*\1>")
_OPEN: Final = re.compile(r"(?:<[^<>/|\uff5c\s]+>|\[[^\[\]/|\s]+\]|◁[^◁▷/\s]+▷)\s*\Z")


def without_special(text: str) -> str:
    """Return a text as people read it, without special tokens such as `<|channel|>`."""
    return _SPECIAL.sub("", text)


def opened_tag(text: str) -> str:
    """Return the tag with which a text ends, such as `<think>`, and the space after it. "" if there is none."""
    found = _OPEN.search(text)
    return found.group() if found else ""
