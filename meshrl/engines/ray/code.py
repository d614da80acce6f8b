"""The software on each node: the user's code, which is copied there, and versions of packages, which must agree."""

import asyncio
import filecmp
import hashlib
import io
import os
import sys
import zipfile
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple, Protocol, cast

import ray
from ray._private.thirdparty.pathspec.pathspec import PathSpec
from ray.cloudpickle.cloudpickle import register_pickle_by_value
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from meshrl import log
from meshrl.errors import ConfigError, OtherVersions
from meshrl.user_code import copied, find_copies, is_installed

ALWAYS: Final = ("meshrl", "torch")
"""Packages that are compared in every run, besides those of its backends."""
_PYTHON: Final = "Python"
_COLUMNS: Final = ("node", "package", "here", "there")
_MISSING: Final = "not installed"
_WITH_RANK: Final = 60.0
"""Least seconds that a node with a rank has to answer. It may be slow to start a process for that."""


class Method(Protocol):
    """A remote function of Ray, or a method of an actor."""

    def remote(self, *arguments: object) -> Awaitable[object]:
        """Send a call. Await the result for the answer."""
        ...


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and packages in this process, without build labels (`+cpu`).

    It travels to nodes by value and needs nothing but Python there, because a node may lack meshrl.
    """
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 -- where it runs
    from platform import python_version  # noqa: PLC0415 -- the same

    found = {"Python": python_version()}
    for package in packages:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class Versions:
    """The versions of this process, which nodes must have too."""

    def __init__(self, packages: Iterable[str], patience: float) -> None:
        """`packages`: those of the run's backends. Packages that are not installed here are not compared.

        `patience`: seconds that nodes have to answer.
        """
        found = installed(sorted({*ALWAYS, *packages}))
        self._here = {name: version for name, version in found.items() if version != _MISSING}
        self._patience = patience
        self._same: set[str] = set()
        """Nodes that were found to agree."""

    async def check(self, nodes: Mapping[str, str], *, have_ranks: bool = False) -> bool:
        """Raise `OtherVersions`, with a table, if nodes differ. `nodes`: display names by Ray's id.

        Each node is asked once. One that does not answer in time is asked again when it has a rank. Returns True if all
        have answered.
        """
        if not (unknown := [node for node in nodes if node not in self._same]):
            return True
        requests = {node: asyncio.ensure_future(self._ask(node)) for node in unknown}
        await asyncio.wait(requests.values(), timeout=max(self._patience, _WITH_RANK) if have_ranks else self._patience)
        others: dict[str, Mapping[str, str]] = {}
        for node, answer in requests.items():
            if not answer.done():
                answer.cancel()
            elif (there := answer.result()) is not None:
                if _differ(self._here, there):
                    others[nodes[node]] = there
                else:
                    self._same.add(node)
        if others:
            raise OtherVersions(table(self._here, others))
        return self._same.issuperset(nodes)

    async def _ask(self, node: str) -> dict[str, str] | None:
        """Return the versions of a node. None if it does not answer."""
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(installed).options(num_cpus=0, scheduling_strategy=there, max_retries=0)
        try:
            answer = await cast("Method", task).remote([name for name in self._here if name != _PYTHON])
            return cast("dict[str, str]", answer)
        except RayError:
            return None


def table(here: Mapping[str, str], others: Mapping[str, Mapping[str, str]]) -> str:
    """Describe the nodes whose versions differ from this one's: the difference, and what to do."""
    rows = [
        (node, package, version, there[package])
        for node, there in others.items()
        for package, version in here.items()
        if package in _differ(here, there)
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (_COLUMNS, *rows)]
    differ = "a node has" if len(others) == 1 else f"{len(others)} nodes have"
    packages = [f"{package}=={version}" for package, version in here.items() if package in {row[1] for row in rows}]
    pip = [package for package in packages if not package.startswith(_PYTHON)]
    pip_does = f", as `pip install {' '.join(pip)}` does there" if pip else ""
    return (
        f"{differ} other versions than the controller, so that no rank may run there:\n"
        + "\n".join(f"  {line.rstrip()}" for line in lines)
        + f"\ninstall {' and '.join(packages)} on each{pip_does}; or keep ranks from these nodes by `custom` in the "
        "table of each mesh"
    )


def _differ(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """Packages with other versions there. A rank reports a missing package that it needs, and this reports meshrl."""
    return [
        package
        for package, version in here.items()
        if there[package] != version and (there[package] != _MISSING or package == "meshrl")
    ]


register_pickle_by_value(sys.modules[__name__])


MOST: Final = 64 * 2**20
"""Most bytes of files that are copied."""
CODE: Final = frozenset({".py", ".pyi", ".so"})
TEXTS: Final = frozenset({".toml", ".json", ".yaml", ".yml", ".txt", ".jinja", ".cfg", ".ini"})
"""Text files that configure code, and are copied with it. Models and data must be where all nodes see them."""
MOST_OF_A_TEXT: Final = 8 * 2**20
"""Size in bytes above which a text file counts as data."""
_ENVIRONMENT: Final = "pyvenv.cfg"
_CONDA: Final = "conda-meta"
_RUN: Final = "metrics.jsonl"
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, in any environment."""
_TOO_WIDE: Final = frozenset({Path("/"), Path(os.path.expanduser("~"))})  # noqa: PTH111 -- there may be no home
"""Folders from which only a module's own file is taken."""
_OURS: Final = tuple(f"{Path(__file__).parents[3] / name}{os.sep}" for name in ("meshrl", "backends", "algorithms"))
_LARGEST: Final = 5
"""Number of files that an error names."""


class Package(NamedTuple):
    """The code, as one file."""

    uri: str
    """Its name in Ray's storage, with the hash of the content."""
    folders: Sequence[str]
    """Folders of this machine with files in it. The files of the first are in folder `0`, and so on."""
    content: bytes

    def upload(self) -> None:
        """Upload it to Ray's head unless it is there. The head passes it to the nodes. Blocks."""
        from ray._private.runtime_env.packaging import (  # noqa: PLC0415 -- Ray has no public way for an actor's alone
            package_exists,
            pin_runtime_env_uri,
            upload_package_to_gcs,
        )

        pin_runtime_env_uri(self.uri)
        if not package_exists(self.uri):
            upload_package_to_gcs(self.uri, self.content)


def has_working_dir() -> bool:
    """True if Ray itself brings a folder to all nodes, as with `ray job submit --working-dir`."""
    return "working_dir" in ray.get_runtime_context().runtime_env


def packaged(folders: Iterable[Path], modules: Mapping[str, ModuleType]) -> Package | None:
    """Package the code that ranks on other nodes may import: these folders, and modules that are not installed.

    An imported package brings its own folder, and a module everything next to it. Returns None if there is nothing.
    Texts of more than `MOST_OF_A_TEXT` are left out and logged. ConfigError with the largest files if the rest exceeds
    `MOST`.
    """
    found: dict[Path, set[Path]] = {}
    for root, part in {*_requested(folders), *_imported(modules)}:
        found.setdefault(root, set()).update([part] if part.is_file() else _files(part))
    data = {file for files in found.values() for file in files if _is_data(file)}
    if data:
        log.warning(
            f"texts of more than {MOST_OF_A_TEXT // 2**20} MiB next to the code count as data, and are not carried to "
            "other nodes: if ranks read them, put them where all nodes see them",
            files=", ".join(map(str, sorted(data))),
        )
    found = {root: files - data for root, files in found.items() if files - data}
    if not found:
        return None
    _check_size({file for files in found.values() for file in files})
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for index, (root, files) in enumerate(sorted(found.items())):
            for file in sorted(files):
                # Without a time, so that the same content makes the same package.
                name = zipfile.ZipInfo(f"{index}/{file.relative_to(root)}")
                archive.writestr(name, file.read_bytes(), zipfile.ZIP_DEFLATED)
    content = packed.getvalue()
    digest = hashlib.sha256(content).hexdigest()[:32]
    return Package(f"gcs://_ray_pkg_{digest}.zip", [str(root) for root in sorted(found)], content)


def _is_data(file: Path) -> bool:
    return file.suffix not in CODE and file.stat().st_size > MOST_OF_A_TEXT


def _is_theirs(file: str) -> bool:
    """True if nodes have it already."""
    own = file.startswith(f"{sys.base_prefix}{os.sep}lib{os.sep}") or not _INSTALLED.isdisjoint(Path(file).parts)
    return own or is_installed(file) or file.startswith(_OURS)


def _requested(folders: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield for each folder its place on the import path, and the part to take."""
    for folder in (each.absolute() for each in folders):
        if folder not in _TOO_WIDE and not _is_theirs(f"{folder}{os.sep}"):
            yield (folder.parent if (folder / "__init__.py").exists() else folder), folder


def _imported(modules: Mapping[str, ModuleType]) -> Iterator[tuple[Path, Path]]:
    """Yield the same for each module that is neither installed nor part of meshrl."""
    for name, module in modules.items():
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith((".py", ".so")) or _is_theirs(file):
            continue
        path = Path(file).absolute()  # with its links, as on the import path
        depth = name.count(".") + (path.stem == "__init__")
        if depth == 0 or name in ("__main__", "__mp_main__"):
            root, part = path.parent, path.parent
        elif len(path.parents) > depth:
            root, part = path.parents[depth], path.parents[depth - 1]
        else:
            continue
        yield root, path  # even if .gitignore names it
        if part not in _TOO_WIDE:
            yield root, part


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files to copy: not those in .gitignore, nor runs, environments and names that begin with a dot."""
    ignored = [*_ignored_above(folder)]
    for here, folders, files in os.walk(folder):
        place = Path(here)
        ignored += _ignored(place)
        folders[:] = [
            each
            for each in folders
            if not each.startswith((".", "__pycache__"))
            and each not in _INSTALLED
            and not (place / each / _ENVIRONMENT).exists()
            and not (place / each / _RUN).exists()
            and not (place / each / _CONDA).exists()
            and not _is_ignored(place / each, ignored, "/")
        ]
        for each in files:
            file = place / each
            wanted = file.suffix in CODE | TEXTS and not each.startswith(".") and not _is_ignored(file, ignored)
            if wanted and file.is_file() and os.access(file, os.R_OK):
                yield file


def _ignored_above(folder: Path) -> Iterator[tuple[Path, PathSpec]]:
    """Yield the .gitignore patterns above a folder, within its repository, from its top down."""
    above = list(folder.parents)
    top = next((number for number, each in enumerate([folder, *above]) if (each / ".git").exists()), 0)
    for each in reversed(above[:top]):
        yield from _ignored(each)


def _ignored(folder: Path) -> Iterator[tuple[Path, PathSpec]]:
    with suppress(OSError, ValueError):  # it may not be text, or have invalid patterns
        lines = (folder / ".gitignore").read_text("utf-8").splitlines()
        yield folder, PathSpec.from_lines("gitwildmatch", lines)


def _is_ignored(path: Path, ignored: Iterable[tuple[Path, PathSpec]], end: str = "") -> bool:
    """True if the last matching pattern, which may be one of a deeper folder, does not begin with `!`."""
    found = False
    for folder, spec in ignored:
        if path.is_relative_to(folder):
            name = f"{path.relative_to(folder)}{end}"
            found = next((one.include for one in reversed([*spec.patterns]) if any(one.match([name]))), found)
    return found


def _check_size(files: Iterable[Path]) -> None:
    sizes = sorted(((file.stat().st_size, str(file)) for file in files), reverse=True)
    if (total := sum(size for size, _ in sizes)) > MOST:
        largest = "\n".join(f"  {size / 2**20:.1f} MiB {file}" for size, file in sizes[:_LARGEST])
        raise ConfigError(
            f"the code to copy to other nodes has {total / 2**20:.1f} MiB, more than the limit of "
            f"{MOST / 2**20:.0f} MiB. It is the script's folder, and modules that are not installed. The largest "
            f"files:\n{largest}\nname files that ranks do not import in .gitignore, or move them to another folder"
        )


def _has_all(folder: Path, copy: Path) -> bool:
    """True if a folder has each file of a copy, with the same content."""
    files = [each.relative_to(copy) for each in copy.rglob("*") if each.is_file() and "__pycache__" not in each.parts]
    return all((folder / each).is_file() and filecmp.cmp(folder / each, copy / each, shallow=False) for each in files)


def settle_in(folders: Sequence[str], paths: Sequence[str]) -> None:
    """Set up the imports of a rank whose current folder is the package's.

    `folders`: those of the package. `paths`: the controller's import path. If this machine has a folder with all files
    of the copy, as on a shared disk, that folder is used. Otherwise the copy comes first.
    """
    here = Path.cwd()
    copies = {Path(folder): here / str(index) for index, folder in enumerate(folders)}
    find_copies({folder: copy for folder, copy in copies.items() if not _has_all(folder, copy)})
    for path in paths:
        place = Path(path).absolute()
        if (copy := copied(place)) != place and copy.is_dir():
            sys.path.insert(sys.path.index(path) if path in sys.path else len(sys.path), str(copy))
            sys.path += [path] if path not in sys.path else []
