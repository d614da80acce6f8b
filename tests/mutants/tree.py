"""Private copies of the product and a suite's tests, which mutants are written into."""

import subprocess
import tomllib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final, Literal

from tests.mutants.mutant import ROOT, Mutant

Suite = Literal["before", "after"]
REVISIONS: Final[dict[Suite, str]] = {"before": "d2169cfc", "after": "eabe9d72"}
"""The last one with the earlier tests, and one with the shorter ones. Their products are nearly the same."""
_MOVED: Final = "meshrl/overlap", "meshrl/rollout"
"""A room, and what the earlier product calls it."""


class Tree:
    """A copy, with an environment whose meshrl is the copy's."""

    def __init__(self, suite: Suite, cache: Path, number: int) -> None:
        """Make it in a folder of `cache`. `number`: of this one among copies of the same."""
        self._suite = suite
        self.version: Final = f"{suite}-{REVISIONS[suite]}"
        self.folder: Final = cache / f"{self.version}-{number}"
        self.folder.mkdir(parents=True, exist_ok=True)
        packed = _output(["git", "archive", REVISIONS[suite]])
        _output(["tar", "-x", "-C", str(self.folder)], packed)  # again, because it may hold a mutant
        if not (self.folder / ".venv").exists():
            self._make_environment(ROOT / ".venv", self.folder / ".venv")

    @contextmanager
    def holding(self, mutant: Mutant) -> Generator[None]:
        """Hold a mutant for a while. Python compiles its file again."""
        path = self.folder / self.place(mutant.file)
        plain, compiled = path.read_text(), Path(cache_from_source(str(path)))
        try:
            path.write_text(mutant.applied(plain))
            compiled.unlink(missing_ok=True)
            yield
        finally:
            path.write_text(plain)
            compiled.unlink(missing_ok=True)

    def place(self, path: str) -> str:
        """Return where this tree has a file or folder of the later product."""
        return path.replace(*_MOVED) if self._suite == "before" else path

    def _make_environment(self, old: Path, new: Path) -> None:
        """Make an environment of links to the packages of another one."""
        (packages,) = old.glob("lib/python*/site-packages")
        for each in [*packages.iterdir(), *(old / "bin").glob("python*")]:
            place = new / each.relative_to(old)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(each.resolve())
        own = new / packages.relative_to(old)
        (own / "_meshrl.pth").unlink()  # a link
        (own / "_meshrl.pth").write_text(f"{self.folder}\n{self.folder / 'backends'}\n")
        (ours,) = own.glob("meshrl-*.dist-info")
        ours.unlink()
        ours.mkdir()
        (ours / "METADATA").write_bytes((packages / ours.name / "METADATA").read_bytes())
        (ours / "entry_points.txt").write_text("\n".join(_entry_points(self.folder / "pyproject.toml")))
        (new / "pyvenv.cfg").write_bytes((old / "pyvenv.cfg").read_bytes())


def _entry_points(pyproject: Path) -> Iterator[str]:
    """Yield the lines that name a tree's command and backends."""
    project = tomllib.loads(pyproject.read_text())["project"]
    for group, names in {"console_scripts": project["scripts"], **project["entry-points"]}.items():
        yield f"[{group}]"
        yield from (f"{name} = {place}" for name, place in names.items())


def _output(command: list[str], given: bytes = b"") -> bytes:
    return subprocess.run(command, cwd=ROOT, input=given, check=True, stdout=subprocess.PIPE).stdout
