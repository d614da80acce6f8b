"""The variables and folders for an engine's process, which may be in another environment."""

import os
import tempfile
from getpass import getuser
from importlib import import_module
from pathlib import Path
from typing import Final

import meshrl_inference
import meshrl_torch

_PATH: Final = 48
"""Most bytes of the path of temporary files, so that engines' socket paths stay within a system's 107."""


def new_folder(backend: str) -> tempfile.TemporaryDirectory[str]:
    """Make an engine's folder for its log and temporary files. It is removed with this object, whatever it contains."""
    usual = tempfile.gettempdir()
    short = usual if len(os.fsencode(usual)) <= _PATH else "/tmp"  # noqa: S108 -- a new name, with mode 700
    return tempfile.TemporaryDirectory(prefix=f"meshrl-{backend}-", dir=short, ignore_cleanup_errors=True)


def environment(folder: Path, backend: str) -> dict[str, str]:
    """Return this process's variables, with this folder for temporary files, and a Python path inside it.

    The path contains only this package, a backend's, and `meshrl_torch`, of which the process imports `wire`. It may
    use another Python with other packages.
    """
    paths = folder / "path"
    paths.mkdir()
    for package in (meshrl_torch, meshrl_inference, import_module(f"meshrl_{backend}")):
        (paths / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    compiled = Path(tempfile.gettempdir(), f"torchinductor_{getuser()}")  # torch's usual place, for later engines
    return {
        **os.environ,
        "PYTHONPATH": str(paths),
        "TMPDIR": str(folder),
        # Not first: torch sets it again, and a process whose first variable has moved cannot tell its title.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled)),
    }
