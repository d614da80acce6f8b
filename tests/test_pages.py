"""What the pages show is there: their code runs, and their commands, keys, links and numbers exist.

The Python blocks of a page run as they stand, one after another. A block whose first line is a comment with the name of
a file, such as `# mine.py` or `# mine.toml`, is there as that file, too. A command may need a GPU or a night: each is
read as the command line reads it, and its settings are read as `meshrl check` reads them.
"""

import ast
import asyncio
import builtins
import inspect
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import typer.main

import meshrl as rl
from meshrl.cli import app
from meshrl.config import Table, validate
from meshrl.errors import ConfigError
from meshrl.run import find_config, load_job, shipped_configs
from meshrl.run.jobs import make_job
from meshrl.testing import FakePolicy, FakeReward, FakeSampler
from meshrl.tinker import ServedConfig

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TEXTS = {page: page.read_text("utf-8") for page in PAGES}
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```(?:python|toml)\n(# (\w+\.(?:py|toml))\n.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
INLINE = re.compile(r"`(meshrl [a-z][^`]*)`")
COMMAND = re.compile(r"^ *(?:\$ )?(meshrl [a-z](?:[^\\\n]|\\\n)*)$", re.MULTILINE)
VARIABLES = {"$FAKES": "policy.backend=fake sampler.backend=fake reward.backend=fake", "$ahead": "2", "$seed": "0"}
CONFIGS = shipped_configs()
FOLDERS = "|".join({name.partition("/")[0] + "/" for name in CONFIGS})
WRONG: dict[tuple[str, ...], str] = {
    ("run", "grpo/quikstart"): "did you mean",
    ("check", "grpo/quickstart", "learning_rate=1e-6"): "no such key",
}
"""Commands that a page shows for their error."""


def blocks(page: Path) -> list[CodeType]:
    """Each Python block, compiled so that it may await at top level and errors show the page's own lines."""
    text = TEXTS[page]
    found: list[CodeType] = []
    for match in PYTHON.finditer(text):
        above = "\n" * (text[: match.start()].count("\n") + 1)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        found.append(compile(above + match[1], str(page), "exec", flags=flags, dont_inherit=True))
    return found


def write_files(page: Path, folder: Path) -> list[Path]:
    texts = {folder / match[2]: match[1] for match in FILE.finditer(TEXTS[page])}
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    return list(texts)


def run_code(page: Path, module: ModuleType, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Run the code of a page as a module, in a folder with the page's files."""
    vars(module)["__builtins__"] = builtins
    patch.setitem(sys.modules, module.__name__, module)
    patch.chdir(folder)
    patch.syspath_prepend(folder)
    files = write_files(page, folder)
    with asyncio.Runner() as runner:
        for code in blocks(page):
            result = FunctionType(code, vars(module))()
            if inspect.iscoroutine(result):
                runner.run(result)
    for file in files:
        sys.modules.pop(file.stem, None)  # another page may have one of this name


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType(f"page_{page.stem}")
    module.__file__ = str(page)
    run_code(page, module, tmp_path, monkeypatch)


async def test_the_algorithm_of_the_readme_trains_on_fakes() -> None:
    page: dict[str, Any] = {}
    for code in blocks(ROOT / "README.md"):
        exec(code, page)  # noqa: S102 -- it is ours
    prompts = [rl.Batch.of(prompt=["1+1="] * 4, answer=["2"] * 4, groups=np.arange(4) + 4 * step) for step in range(3)]
    policy, sampler = FakePolicy(rl.PolicyConfig(model="none")), FakeSampler(rl.SamplerConfig(model="none"))
    await page["grpo"](policy, sampler, FakeReward(rl.RewardConfig()), iter(prompts), ahead=1)
    assert policy.version == 3


def commands(page: Path) -> Iterator[tuple[str, ...]]:
    """The words after `meshrl` of each command in the code of a page, without those that name no command."""
    text = TEXTS[page]
    code = [*FENCED.findall(text), *INDENTED.findall(text)]
    for line in [line for block in code for line in COMMAND.findall(block)] + INLINE.findall(text):
        whole = re.sub("|".join(map(re.escape, VARIABLES)), lambda name: VARIABLES[name[0]], line.replace("\\\n", " "))
        yield tuple(shlex.split(whole, comments=True)[1:])


def told(command: tuple[str, ...]) -> str:
    """What the command line says of a command, and `meshrl check` of its settings for a shipped configuration."""
    words = [*command]
    known: Any = typer.main.get_command(app)
    while words and (below := getattr(known, "commands", None)):
        if words[0] not in below:
            return f"there is no command {words[0]}"
        known = below[words.pop(0)]
    try:
        if words:
            known.make_parser(known.context_class(known)).parse_args(words)
        overrides = [word for word in command[1:] if re.match(r"[a-z_.]+=", word)]
        for name in command[1:]:
            if re.match(FOLDERS, name) and not name.endswith(".toml"):
                load_job(find_config(name), overrides)
    except Exception as error:  # noqa: BLE001 -- whatever is wrong is told
        return str(error) or repr(error)
    return ""


def test_the_commands_of_the_pages_exist_and_take_their_options() -> None:
    pages = {command: page.name for page in PAGES for command in commands(page)}
    assert pages.keys() >= WRONG.keys()
    said = {command: told(command) for command in pages}
    wrong = [
        f"{pages[command]}: meshrl {shlex.join(command)}: {text}"
        for command, text in said.items()
        if (WRONG[command] not in text if command in WRONG else text)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_keys_of_configurations_on_pages_exist(tmp_path: Path) -> None:
    """A part of one is put over those that are shipped, until one has its keys. Files that it names may be missing."""
    wrong: list[str] = []
    shipped = [tomllib.loads(path.read_text("utf-8")) for path in CONFIGS.values()]
    tables = [(page, block) for page in PAGES for block in TOML.findall(TEXTS[page])]
    for number, (page, block) in enumerate(tables):
        (folder := tmp_path / f"{number}").mkdir()
        write_files(page, folder)
        table = tomllib.loads(block)
        if "project" in table:  # it is for a pyproject.toml
            continue
        if "tinker" in table:
            models: Table = {"policy": {"model": "m"}, "sampler": {"model": "m"}}
            validate(ServedConfig, {**models, **table}, folder / "mine.toml", folder=folder)
            continue
        found: list[str] = []
        for base in [{}] if "algorithm" in table else shipped:
            found.append(mistakes(over(base, table), folder / "mine.toml"))
            if "no such key" not in found[-1]:
                break
        else:
            wrong.append(f"{page.name}: {min(found, key=len)}")
    assert not wrong, "\n".join(wrong)


def over(base: Table, table: Table) -> Table:
    merged = {**base, **table}
    for key, value in table.items():
        if isinstance(value, dict) and isinstance(own := base.get(key), dict):
            merged[key] = over(own, value)
    return merged


def mistakes(table: Table, file: Path) -> str:
    try:
        make_job(file, table, file.parent)
    except ConfigError as error:
        return str(error)
    return ""


def test_links_to_files_lead_somewhere() -> None:
    wrong = [
        f"{page.name}: {link}"
        for page in (*ROOT.glob("*.md"), *PAGES[1:])
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        if not (page.parent / link).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_files_of_code_that_pages_name_exist() -> None:
    folders = ("meshrl", "backends", "algorithms", "examples", "bench", "tests", "docs")
    files = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    wrong = [
        f"{page.name}: {name}"
        for page in (ROOT / "CONTRIBUTING.md", *PAGES)
        if not page.name.startswith("from-")  # these name other projects' files
        for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text("utf-8"))
        if "NAME" not in name and not name.startswith("mine/") and not any(each.endswith(f"/{name}") for each in files)
    ]
    assert not wrong, "\n".join(wrong)


def test_each_page_is_in_the_list_once_which_is_the_navigation_of_the_site() -> None:
    listed = re.findall(r"^- \[.*?\]\((\w[^)#]*\.md)\)", TEXTS[DOCS / "README.md"], re.MULTILINE)
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages), "write each page's line into docs/README.md"


def test_the_readme_names_make_targets_that_exist_and_figures_of_the_benchmarks_beside_their_commands() -> None:
    readme = TEXTS[ROOT / "README.md"]
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z0-9]+)", readme, re.MULTILINE)) <= targets
    table = re.compile(r"^\| .*? \| ([\d.,]+).*? \| .*? ([\d.,]+) \| ([\d.]+) \| `(.*?)` \|$", re.MULTILINE)
    rows = table.findall(readme)
    assert len(rows) > 3
    sections = re.split("^##+ ", TEXTS[DOCS / "benchmarks.md"], flags=re.MULTILINE)
    for *figures, command in rows:
        block = re.compile(rf"^    python bench/{re.escape(command)}( --svg \S+)?$", re.MULTILINE)
        lines = [line for section in sections if block.search(section) for line in section.splitlines()]
        assert any({*figures} <= {*line.split()} for line in lines), f"no row of `{command}` has {figures}"


def test_what_coding_agents_read_is_short_and_names_targets_and_files_that_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text("utf-8")
    assert len(text.splitlines()) < 150
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, re.MULTILINE)
    files = re.findall(r"[ `]((?:meshrl|docs|tests|backends|algorithms|configs)/[\w./-]*)", text)
    assert (len(named) > 5, len(files) > 10) == (True, True)
    assert [name for name in named if name not in targets] == []
    assert [file for file in files if not (ROOT / file).exists() and not file.startswith("backends/meshrl_")] == []
