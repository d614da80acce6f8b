"""What goes out with a release, beyond its files: what an index shows of it, licences, and what breaks users' code."""

import re
import subprocess
import zipfile
from email.parser import Parser
from importlib.metadata import metadata
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT
from tests.packaging.test_contents import CHANGELOG, EXTRAS, PROJECT, VERSION, pins

SIGNATURES = "tests/public_signatures.txt"
PERMISSIVE = re.compile(
    r"0BSD|Apache\W|BSD|BSL-1|CC0|CNRI-Python|DFSG approved|ISC|LLVM-exception|MIT|MPL|Mozilla|PSF|Python Soft|Zlib"
)
"""Licences that ask for no licence of the code that uses a package."""
IN_A_FILE = {"zss": "BSD-3-Clause"}
"""Packages whose licence stands in a file alone."""


def test_an_index_shows_the_version_the_licence_and_the_readme_and_installs_the_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(archive.read(name).decode())
        licences = [name for name in archive.namelist() if ".dist-info/licenses/" in name]
    assert (told["Name"], told["Version"], told["License-Expression"]) == ("meshrl", VERSION, PROJECT["license"])
    assert [Path(name).name for name in licences] == PROJECT["license-files"]
    assert (told["Requires-Python"], told["Description-Content-Type"]) == (PROJECT["requires-python"], "text/markdown")
    assert str(told.get_payload()) == (ROOT / "README.md").read_text("utf-8")
    assert {*told.get_all("Provides-Extra", [])} == EXTRAS.keys()


def test_each_dependency_has_a_permissive_licence() -> None:
    wrong = [f"{name}: {found}" for name in pins("requirements.txt") if not permissive(found := licence(name))]
    assert not wrong, "\n".join(wrong)
    assert [each for each in ("GPL-3.0-only", "MIT AND LGPL-2.1", "", "Proprietary") if permissive(each)] == []


def licence(package: str) -> str:
    told = metadata(package)
    classified = [each for each in told.get_all("Classifier", []) if each.startswith("License :: ")]
    named = told.get_all("License-Expression") or [each.rpartition(" :: ")[2] for each in classified]
    first = [text.partition("\n")[0] for text in named or told.get_all("License", [])]
    return " AND ".join(first) or IN_A_FILE.get(package, "")


def permissive(licence: str) -> bool:
    """True if each part of an expression is, of alternatives as well."""
    return all(PERMISSIVE.search(f"{part} ") for part in re.split(r" (?:AND|OR|WITH) ", licence))


def test_a_public_name_that_changed_since_the_last_release_is_in_the_changelog() -> None:
    """In backticks, in a section above that of the last release."""
    released = git("tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname").split()
    earlier = [tag for tag in released if tag != f"v{VERSION}"]
    if not earlier:
        pytest.skip("there is no earlier release")
    broken = changed(git("show", f"{earlier[0]}:{SIGNATURES}"), (ROOT / SIGNATURES).read_text("utf-8"))
    since = CHANGELOG.partition(f"\n## [{earlier[0].removeprefix('v')}]")[0]
    assert sorted(name for name in broken if not re.search(rf"`(?:rl\.)?{name}\b", since)) == []


def test_what_breaks_code_is_a_name_that_is_gone_and_a_line_that_is_gone_and_nothing_that_is_new() -> None:
    before = "class Kept()\n    x: int\nclass Gone()\ndef f(x: int) -> int\nasync def g() -> None\nN\n"
    after = "class Kept()\n    x: int\n    y: int = 0\nclass New()\ndef f(x: str) -> int\nasync def g() -> None\nN\n"
    assert changed(before, after) == {"Gone", "f"}


def changed(before: str, after: str) -> set[str]:
    """The names that lack a line that they had."""
    now = by_name(after)
    return {name for name, lines in by_name(before).items() if lines - now.get(name, set())}


def by_name(signatures: str) -> dict[str, set[str]]:
    """The lines of each public name."""
    blocks = re.split(r"\n(?! )", signatures.strip())
    return {re.sub(r"(?:async )?(?:class|def) ", "", block).partition("(")[0]: {*block.split("\n")} for block in blocks}


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout
