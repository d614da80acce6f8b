"""What the pages tell a reader to type: their commands exist, and their configurations have keys that are known.

Python blocks run as they stand, in test_readme.py. A command may need a GPU or a night; here each is read as the
command line reads it, and its settings are read as `meshrl check` reads them.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from meshrl.cli import app
from meshrl.config import Table
from meshrl.errors import ConfigError
from meshrl.run import RunConfig, find_config, load_job, shipped_configs
from meshrl.run.jobs import make_job
from tests.test_readme import PAGES, write_files

FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
INLINE = re.compile(r"`(meshrl [a-z][^`]*)`")
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^ *(?:\$ )?(meshrl [a-z](?:[^\\\n]|\\\n)*)$", re.MULTILINE)
VARIABLES = {"$FAKES": "policy.backend=fake sampler.backend=fake reward.backend=fake", "$ahead": "2", "$seed": "0"}
CONFIGS = shipped_configs()
FOLDERS = "|".join({name.partition("/")[0] + "/" for name in CONFIGS})


class Command(NamedTuple):
    """A command of a page."""

    page: str
    words: tuple[str, ...]


def commands(page: Path) -> Iterator[Command]:
    """The commands `meshrl ...` in the code of a page, without those that name no command."""
    text = page.read_text("utf-8")
    code = [*FENCED.findall(text), *INDENTED.findall(text)]
    lines = [line for block in code for line in COMMAND.findall(block)] + INLINE.findall(text)
    for line in lines:
        whole = re.sub("|".join(map(re.escape, VARIABLES)), lambda name: VARIABLES[name[0]], line.replace("\\\n", " "))
        words = shlex.split(whole, comments=True)
        yield Command(page.name, tuple(words[1:]))


ALL = sorted({each for page in PAGES for each in commands(page)})
WRONG: dict[tuple[str, ...], str] = {
    ("run", "grpo/quikstart"): "did you mean",
    ("check", "grpo/quickstart", "learning_rate=1e-6"): "no such key",
}
"""Commands that a page shows for their error."""


def told(command: Command) -> str:
    """What `meshrl check` says of the settings of a shipped configuration. Empty where there is none to check."""
    _, *words = command.words
    names = [word for word in words if re.match(FOLDERS, word) and not word.endswith(".toml")]
    overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
    try:
        for name in names:
            load_job(find_config(name), overrides, RunConfig)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("command", ALL, ids=lambda command: f"{command.page}: {shlex.join(command.words)}")
def test_a_command_of_a_page_exists_and_takes_its_options(command: Command) -> None:
    words: list[str] = [*command.words]
    known: Any = typer.main.get_command(app)
    while words and (commands := getattr(known, "commands", None)):
        assert words[0] in commands, f"there is no command {words[0]}"
        known = commands[words.pop(0)]
    if words:
        known.make_parser(known.context_class(known)).parse_args(words)
    assert (WRONG.get(command.words) or "") in told(command)
    assert command.words in WRONG or not told(command)


def test_each_command_that_is_shown_for_its_error_is_there() -> None:
    assert {command.words for command in ALL} >= WRONG.keys()


@pytest.mark.parametrize(
    ("page", "block"),
    [pytest.param(page, block, id=page.name) for page in PAGES for block in TOML.findall(page.read_text("utf-8"))],
)
def test_the_keys_of_a_configuration_on_a_page_exist(page: Path, block: str, tmp_path: Path) -> None:
    """A part of one is put over each that is shipped. Files that it names may be missing, so only keys count."""
    write_files(page, tmp_path)
    table = tomllib.loads(block)
    if "project" in table:
        pytest.skip("it is for a pyproject.toml")
    bases = [{}] if "algorithm" in table else [tomllib.loads(path.read_text("utf-8")) for path in CONFIGS.values()]
    found = [mistakes(over(base, table), tmp_path / "mine.toml") for base in bases]
    assert [each for each in found if "no such key" not in each], min(found, key=len)


def over(base: Table, table: Table) -> Table:
    """One configuration put over another."""
    merged = {**base, **table}
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(own := base.get(key), dict):
            merged[key] = over(own, value)
    return merged


def mistakes(table: Table, file: Path) -> str:
    """What `meshrl check` says of the keys of a configuration. Empty if they are right."""
    try:
        make_job(file, table, RunConfig, file.parent)
    except ConfigError as error:
        return str(error)
    return ""
