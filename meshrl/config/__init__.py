"""Configuration: frozen pydantic models that are read from TOML. Every mistake in a file is reported at once.

`load_toml` reads a file and applies the overrides of a command line. `validate` makes a `Config` of the table, or
raises one error with all mistakes, in the terms of the file. `PathIn` marks keys that may hold a path, and
`CODE` keys that may name a function in a file.
"""

from meshrl.config.base import CODE, Config, Keys, PathIn, Table, dotted, expanded, leaves
from meshrl.config.toml_file import DEEPEST, apply_overrides, load_toml, too_deep
from meshrl.config.validation import as_list, mistakes_in, validate

__all__ = [
    "CODE",
    "DEEPEST",
    "Config",
    "Keys",
    "PathIn",
    "Table",
    "apply_overrides",
    "as_list",
    "dotted",
    "expanded",
    "leaves",
    "load_toml",
    "mistakes_in",
    "too_deep",
    "validate",
]
