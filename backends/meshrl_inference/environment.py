"""What a process in another environment, one that has an engine, is given of ours."""

import os
import tempfile
from getpass import getuser
from importlib import import_module
from pathlib import Path
from typing import Final

import meshrl_inference

_PATH: Final = 48
"""Bytes of the path of temporary files, so that a system takes engines' sockets in it: 107 at most."""


def new_folder(backend: str) -> tempfile.TemporaryDirectory[str]:
    """An engine's folder for its log and temporary files. With this object goes whatever an engine leaves there."""
    usual = tempfile.gettempdir()
    short = usual if len(os.fsencode(usual)) <= _PATH else "/tmp"  # noqa: S108 -- under a new name, with mode 700
    return tempfile.TemporaryDirectory(prefix=f"meshrl-{backend}-", dir=short, ignore_cleanup_errors=True)


def environment(folder: Path, backend: str) -> dict[str, str]:
    """The variables of this process, but with this folder for temporary files, and a path in it.

    On that are this package and a backend's, and no other of ours: the process may be one of another Python, with other
    packages.
    """
    paths = folder / "path"
    paths.mkdir()
    for package in (meshrl_inference, import_module(f"meshrl_{backend}")):
        (paths / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    compiled = Path(tempfile.gettempdir(), f"torchinductor_{getuser()}")  # torch's own place, for later engines
    return {
        **os.environ,
        "PYTHONPATH": str(paths),
        "TMPDIR": str(folder),
        # Not the first: torch sets it again, and a process whose first variable has moved cannot tell its title.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
    }
