"""What a run of the tests costs, from its junit file: `python tests/profile.py FILE`.

`pytest -p tests.support.counted --junitxml FILE` writes one that also counts what each test starts: processes,
interpreters among them, engines (templates of ranks, clusters, inference engines) and imports of torch.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

COUNTED = {"process": "processes", "interpreter": "interpreters", "engine": "engines", "torch": "torch imports"}
SLOWEST = 100


class Case(NamedTuple):
    """One test, with the seconds of its set-up and tear-down."""

    file: str
    name: str
    seconds: float
    counts: Mapping[str, int]


def read_cases(path: Path) -> list[Case]:
    """Read the tests of a junit file. Ones that were skipped are there too."""
    cases: list[Case] = []
    for each in ET.parse(path).iter("testcase"):  # noqa: S314 -- pytest wrote it
        parts = [part for part in each.get("classname", "").split(".") if not part[:1].isupper()]
        counts = {one.get("name", ""): int(one.get("value", "0")) for one in each.iter("property")}
        counts = {name: count for name, count in counts.items() if name in COUNTED}
        cases.append(Case("/".join(parts) + ".py", each.get("name", ""), float(each.get("time", "0")), counts))
    return cases


def line(name: str, cases: Sequence[Case]) -> str:
    """Return a line of a table: how many tests, their seconds, and what they start."""
    counts = [sum(case.counts.get(each, 0) for case in cases) for each in COUNTED]
    seconds = sum(case.seconds for case in cases)
    return f"{name:<52}{len(cases):>7}{seconds:>9.1f}" + "".join(f"{count:>15}" for count in counts)


def table(title: str, cases: Sequence[Case], group_of: Callable[[Case], str]) -> str:
    """Return a table of groups of tests, the slowest first, and their sum."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[group_of(case)].append(case)
    slowest = sorted(groups.items(), key=lambda group: -sum(case.seconds for case in group[1]))
    head = f"{title:<52}{'tests':>7}{'seconds':>9}" + "".join(f"{name:>15}" for name in COUNTED.values())
    return "\n".join([head, *(line(*group) for group in slowest), line("all", cases)])


def main() -> None:
    """Print the tables. A file that lies beside the folders is one of them."""
    cases = read_cases(Path(sys.argv[1]))
    print(table("folder", cases, lambda case: case.file.split("/")[1]))
    print(f"\n{table('file', cases, lambda case: case.file)}")
    slowest = sorted(cases, key=lambda case: -case.seconds)[:SLOWEST]
    print(f"\nthe {len(slowest)} slowest tests")
    print(*(f"{case.seconds:>8.1f}  {case.file}::{case.name}" for case in slowest), sep="\n")


if __name__ == "__main__":
    main()
