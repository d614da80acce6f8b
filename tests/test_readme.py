"""The Python blocks of the README and of docs/ run as they stand, those of one page one after another.

A block whose first line is a comment with the name of a file, such as `# mine.py` or `# mine.toml`, is there as that
file, too.
"""

import ast
import asyncio
import builtins
import inspect
import re
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

import meshrl as rl
from meshrl.testing import FakePolicy, FakeReward, FakeSampler

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```(?:python|toml)\n(# (\w+\.(?:py|toml))\n.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[CodeType]:
    """Each Python block, compiled so that it may await at top level and errors show the page's own lines."""
    text = page.read_text("utf-8")
    found: list[CodeType] = []
    for match in BLOCK.finditer(text):
        above = "\n" * (text[: match.start()].count("\n") + 1)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        found.append(compile(above + match[1], str(page), "exec", flags=flags, dont_inherit=True))
    return found


def write_files(page: Path, folder: Path) -> list[Path]:
    texts = {folder / match[2]: match[1] for match in FILE.finditer(page.read_text("utf-8"))}
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    return list(texts)


def run(page: Path, module: ModuleType) -> None:
    with asyncio.Runner() as runner:
        for code in blocks(page):
            result = FunctionType(code, vars(module))()
            if inspect.iscoroutine(result):
                runner.run(result)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = ModuleType(f"page_{page.stem}")
    vars(module)["__builtins__"] = builtins
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    files = write_files(page, tmp_path)
    run(page, module)
    for file in files:
        sys.modules.pop(file.stem, None)  # another page may have one of this name


async def test_the_algorithm_of_the_readme_trains_on_fakes() -> None:
    page: dict[str, Any] = {}
    for code in blocks(ROOT / "README.md"):
        exec(code, page)  # noqa: S102 -- it is ours
    prompts = [rl.Batch.of(prompt=["1+1="] * 4, answer=["2"] * 4, groups=np.arange(4) + 4 * step) for step in range(3)]
    policy, sampler = FakePolicy(rl.PolicyConfig(model="none")), FakeSampler(rl.SamplerConfig(model="none"))
    await page["grpo"](policy, sampler, FakeReward(rl.RewardConfig()), iter(prompts), ahead=1)
    assert policy.version == 3


def test_the_readmes_figures_against_peers_are_those_of_their_commands_in_the_benchmarks() -> None:
    table = re.compile(r"^\| .*? \| ([\d.,]+).*? \| .*? ([\d.,]+) \| ([\d.]+) \| `(.*?)` \|$", re.MULTILINE)
    rows = table.findall(PAGES[0].read_text("utf-8"))
    assert len(rows) > 3
    sections = re.split("^##+ ", (ROOT / "docs/benchmarks.md").read_text("utf-8"), flags=re.MULTILINE)
    for *figures, command in rows:
        block = re.compile(rf"^    python bench/{re.escape(command)}( --svg \S+)?$", re.MULTILINE)
        lines = [line for section in sections if block.search(section) for line in section.splitlines()]
        assert any({*figures} <= {*line.split()} for line in lines), f"no row of `{command}` has {figures}"


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *PAGES[1:]], ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_each_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z0-9]+)", PAGES[0].read_text("utf-8"), re.MULTILINE))
    assert named <= targets
