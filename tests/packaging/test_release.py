"""What a release consists of agrees with itself: the version, the changelog, the tag, the citation, the hooks."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.packaging.conftest import ROOT
from tests.packaging.test_contents import PROJECT

VERSION = str(PROJECT["version"])
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    versions = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    for version in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version), version
    for section in CHANGELOG.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert kinds == [kind for kind in KINDS if kind in kinds]
        assert not re.search(r"^- ", section.partition("\n### ")[0], re.MULTILINE), "an entry stands under a kind"


def test_a_tag_is_the_version_and_has_a_section_of_the_changelog() -> None:
    command = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    told = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert set(told.stdout.split()) <= {f"v{VERSION}"}
    if told.stdout:
        assert f"\n## [{VERSION}] - " in CHANGELOG


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == VERSION
    assert citation["license"] == PROJECT["license"]
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}


def test_the_hooks_are_what_lint_runs() -> None:
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    hooks = {hook["entry"].partition(" ")[0].rpartition("/")[2] for hook in local["hooks"] if "stages" not in hook}
    lint = re.search(r"^lint: ([\w ]+?) *##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert lint
    assert hooks == {*lint[1].split()}
