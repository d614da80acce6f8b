"""Configuration: frozen pydantic models read from TOML, and every mistake in a file told at once.

`load_toml` reads a file and puts the overrides of a command line over it; `validate` makes a `Config` of the table, or
raises one error with all that is wrong, in the words of the file. `PathIn` marks the keys that may hold a path.
"""

from meshrl.config.base import Config, Keys, Table, dotted
from meshrl.config.paths import PathIn
from meshrl.config.toml_file import DEEPEST, load_toml, put_over, too_deep
from meshrl.config.validation import as_list, mistakes_in, validate

__all__ = [
    "DEEPEST",
    "Config",
    "Keys",
    "PathIn",
    "Table",
    "as_list",
    "dotted",
    "load_toml",
    "mistakes_in",
    "put_over",
    "too_deep",
    "validate",
]
