"""What a process in another environment, one that has an engine, is given of ours."""

import os
from importlib import import_module
from pathlib import Path

import meshrl_inference


def environment(folder: Path, backend: str) -> dict[str, str]:
    """The variables of this process, with a path, made in the folder, on which are this package and a backend's.

    No other of ours is there: the process may be one of another Python, with other packages.
    """
    paths = folder / "path"
    paths.mkdir()
    for package in (meshrl_inference, import_module(backend)):
        (paths / package.__name__).symlink_to(Path(str(package.__file__)).parent)
    return {**os.environ, "PYTHONPATH": str(paths)}
