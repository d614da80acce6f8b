"""Configuration: frozen pydantic models that are read from TOML. Every mistake in a file is reported at once.

`load_toml` reads a file and applies the overrides of a command line. `validate` makes a `Config` of the table, or
raises one error with all mistakes, in the terms of the file. `PathIn` marks keys that may hold a path, and
`CODE` keys that may name a function in a file.
"""

from meshrl.config.base import (
    CODE as CODE,
    Config as Config,
    Keys as Keys,
    PathIn as PathIn,
    Table as Table,
    dotted as dotted,
    expanded as expanded,
    leaves as leaves,
)
from meshrl.config.toml_file import (
    DEEPEST as DEEPEST,
    apply_overrides as apply_overrides,
    load_toml as load_toml,
    too_deep as too_deep,
)
from meshrl.config.validation import as_list as as_list, mistakes_in as mistakes_in, validate as validate
