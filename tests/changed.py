"""Run `make test`, and the parts of `make test-all` that the changes since a commit have to pass: `changed.py COMMIT`.

`tests/parts.toml` says which these are. Changes that are not committed count, and so do new files.
"""

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]


def read_parts() -> dict[str, list[str]]:
    return tomllib.loads((ROOT / "tests/parts.toml").read_text("utf-8"))


def needed_parts(files: Iterable[str], parts: Mapping[str, Sequence[str]]) -> list[str] | None:
    """Return the parts that changes of these files have to pass. None means all of them.

    A folder of tests has to pass itself. A page beside the folders, such as the README, needs no part of its own.
    """
    needed: set[str] = set()
    for file in map(PurePosixPath, files):
        folder = next((str(folder) for folder in file.parents if str(folder) in parts), None)
        if folder is not None:
            needed |= {*parts[folder]}
        elif file.parts[0] == "tests" and len(file.parts) > 2:
            needed.add("/".join(file.parts[:2]))
        elif file.suffix != ".md":
            return None
    return sorted(needed)


def _git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: make test-changed BASE=COMMIT")
    files = _git("diff", "--name-only", sys.argv[1]) + _git("ls-files", "--others", "--exclude-standard")
    parts = needed_parts(files, read_parts())
    if parts is None:
        commands = [["make", "test-all"]]
    else:
        folders = [part for part in parts if part.startswith("tests/")]
        targets = [f"test-{part}" for part in parts if part not in folders]
        commands = [["make", "test"]]
        if folders:
            commands.append([sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-m", "wide", *folders])
        if targets:
            commands.append(["make", "WIDE=yes", *targets])
    for command in commands:
        print(*command, flush=True)
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode not in (0, 5):  # 5: no test of these folders is marked wide
            raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
