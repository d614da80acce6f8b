"""What a process in another environment, one that has vLLM, is given of ours."""

import os
from pathlib import Path

import meshrl_vllm


def environment(folder: Path) -> dict[str, str]:
    """The variables of this process, with a path, made in the folder, on which is this package and no other of ours."""
    paths = folder / "path"
    paths.mkdir()
    (paths / meshrl_vllm.__name__).symlink_to(Path(meshrl_vllm.__file__).parent)
    return {**os.environ, "PYTHONPATH": str(paths)}
