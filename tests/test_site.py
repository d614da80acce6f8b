"""The list of pages, which is the navigation of the site too, and the numbers that the reference explains."""

import re
from pathlib import Path

from meshrl.report.quantities import QUANTITIES, quantity

DOCS = Path(__file__).parents[1] / "docs"


def test_each_page_is_in_the_list_once() -> None:
    listed = re.findall(r"^- \[.*?\]\((\w[^)#]*\.md)\)", (DOCS / "README.md").read_text("utf-8"), re.MULTILINE)
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages), "write each page's line into docs/README.md"


def test_each_known_number_has_a_meaning_and_is_found_by_its_name() -> None:
    for name, known in QUANTITIES.items():
        assert known.meaning.endswith("."), name
        assert quantity(name) is known, f"{name} is hidden by another that comes first"
