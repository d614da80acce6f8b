"""Whether an engine has its own code for a model, by its sources, which need not be importable here."""

import re
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from meshrl.roles import SamplerConfig, options_of
from meshrl_inference.options import EngineOptions
from meshrl_torch.model.loading import config_of


class _Sources(NamedTuple):
    """Where an engine names the classes that it has models for."""

    files: str
    """A pattern, inside its package."""
    names: str
    """What stands around names in these files."""


_SOURCES: Final[Mapping[str, _Sources]] = {
    "vllm": _Sources("model_executor/models/registry.py", r'"(\w+)":\s*\('),
    "sglang": _Sources("srt/models/*.py", r"(?m)^EntryClass\s*=\s*(\[[^\]]*\]|\w+)"),
}
_FIND: Final = "import sys, importlib.util as u; print(u.find_spec(sys.argv[1]).submodule_search_locations[0])"
_PATIENCE: Final = 60.0
"""Seconds that another Python has to say where a package is."""


def reads(config: SamplerConfig) -> str:
    """Return "packed", or who reads a model for which the installed engine has no class.

    ModelError if the model's configuration cannot be read.
    """
    names = tuple(getattr(config_of(config), "architectures", None) or ())
    known = _known(config.backend, options_of(config, EngineOptions).python)
    if not names or not known or known.intersection(names):
        return "packed"
    return f"read by transformers' code inside {config.backend}, if it fits: {config.backend} has no {names[0]}"


@cache
def _known(package: str, python: str | None) -> frozenset[str]:
    """Return the names of an engine's models. Empty if its sources are not found."""
    sources, folder = _SOURCES[package], _folder_of(package, python)
    texts = [each.read_text("utf-8") for each in folder.glob(sources.files)] if folder else []
    found = (name for text in texts for name in re.findall(sources.names, text))
    return frozenset(name for names in found for name in re.findall(r"\w+", names))


def _folder_of(package: str, python: str | None) -> Path | None:
    if python is None:
        spec = find_spec(package)
        places = (spec and spec.submodule_search_locations) or ()
        return next(map(Path, places), None)
    try:
        command = [python, "-c", _FIND, package]
        done = subprocess.run(command, capture_output=True, check=True, timeout=_PATIENCE)  # noqa: S603 -- the user's
    except (OSError, subprocess.SubprocessError):  # the engine's start says why
        return None
    return Path(done.stdout.decode().strip())
