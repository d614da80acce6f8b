"""What a run of the tests costs, from its junit file: `python tests/profile.py FILE`.

`pytest -p tests.support.counted --junitxml FILE` writes one that also counts what each test starts: processes,
interpreters among them, engines (templates of ranks, clusters, inference engines) and imports of torch.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
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

    @property
    def folder(self) -> str:
        """The part of the suite, or the file that lies beside the folders."""
        return self.file.split("/")[1]


def read_cases(path: Path) -> list[Case]:
    """Read the tests of a junit file. Ones that were skipped are there too."""
    cases: list[Case] = []
    for each in ET.parse(path).iter("testcase"):  # noqa: S314 -- pytest wrote it
        parts = [part for part in each.get("classname", "").split(".") if not part[:1].isupper()]
        counts = {one.get("name", ""): int(one.get("value", "0")) for one in each.iter("property")}
        counts = {name: count for name, count in counts.items() if name in COUNTED}
        cases.append(Case("/".join(parts) + ".py", each.get("name", ""), float(each.get("time", "0")), counts))
    return cases


def table(title: str, groups: Mapping[str, Iterable[Case]]) -> str:
    """Return a table of groups of tests, the slowest first, and their sum."""
    rows: list[tuple[str, int, float, Counter[str]]] = []
    for name, group in groups.items():
        cases = list(group)
        counts: Counter[str] = Counter()
        for case in cases:
            counts.update(case.counts)
        rows.append((name, len(cases), sum(case.seconds for case in cases), counts))
    rows.sort(key=lambda row: -row[2])
    whole: Counter[str] = Counter()
    for row in rows:
        whole.update(row[3])
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows), whole))
    head = f"{title:<52}{'tests':>7}{'seconds':>9}" + "".join(f"{name:>15}" for name in COUNTED.values())
    lines = [
        f"{name:<52}{count:>7}{seconds:>9.1f}" + "".join(f"{counts[each]:>15}" for each in COUNTED)
        for name, count, seconds, counts in rows
    ]
    return "\n".join([head, *lines])


def main() -> None:
    """Print the tables."""
    cases = read_cases(Path(sys.argv[1]))
    folders: dict[str, list[Case]] = defaultdict(list)
    files: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        folders[case.folder].append(case)
        files[case.file].append(case)
    slowest = sorted(cases, key=lambda case: -case.seconds)[:SLOWEST]
    print(table("folder", folders), table("file", files), sep="\n\n")
    print(f"\nthe {len(slowest)} slowest tests")
    print(*(f"{case.seconds:>8.1f}  {case.file}::{case.name}" for case in slowest), sep="\n")


if __name__ == "__main__":
    main()
