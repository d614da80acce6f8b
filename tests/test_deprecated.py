"""What had another module or name before the rooms can still be imported, with a warning that says where it is now."""

# pyright: reportDeprecated=false

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

from meshrl.deprecated import ELSEWHERE, GOES, MOVED


@pytest.mark.process
def test_an_old_name_is_found_and_warns_where_it_is_now() -> None:
    for old, places in MOVED.items():
        sys.modules.pop(f"meshrl.{old}", None)
        with pytest.warns(DeprecationWarning, match=rf"meshrl\.{old} goes with meshrl {GOES}.*{places.split()[0]}"):
            import_module(f"meshrl.{old}")
    for module, names in ELSEWHERE.items():
        for name, (place, _, now) in ((name, path.rpartition(".")) for name, path in names.items()):
            with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} goes with meshrl {GOES}: use {place}"):
                value = getattr(import_module(module), name)
            assert value is getattr(import_module(place), now)
    with pytest.raises(ModuleNotFoundError):
        import_module("meshrl.nothing")
    code = (
        "import meshrl\nfrom meshrl.calls import Calls\nimport meshrl.calls\n"
        "from meshrl.roles.generate_calls import GenerateCalls\n"
        "assert Calls is GenerateCalls and not hasattr(meshrl.calls, 'nothing')"
    )
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert [line.partition(": ")[0] for line in done.stderr.splitlines() if "Deprecation" in line] == ["<string>:2"]


def test_what_is_deprecated_goes_with_the_version_that_was_announced() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    version = tomllib.loads(pyproject.read_text("utf-8"))["project"]["version"]
    assert Version(version) < Version(GOES), f"remove what goes with {GOES}, and set GOES to a later version"
