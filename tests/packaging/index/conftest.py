"""The package index that pip is set to use; without one, these tests are skipped."""

import subprocess
import sys

import pytest

from tests.packaging.conftest import uv

SETTINGS = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
"""What pip calls them, and uv."""


@pytest.fixture(scope="session")
def index() -> dict[str, str]:
    """The environment in which uv uses pip's index, and takes the newest version of all its parts, as pip does."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for line in told.stdout.splitlines():
        key, _, value = line.partition("=")
        setting = key.rpartition(".")[2]
        if setting in SETTINGS:
            found[SETTINGS[setting]] = " ".join(value.strip("'").replace("\\n", " ").split())
        elif setting == "cert":
            found["SSL_CERT_FILE"] = value.strip("'")
    asked = uv("pip", "install", "--dry-run", "--reinstall", "--no-deps", "--python", sys.executable, "xxhash", **found)
    if asked.returncode != 0:
        pytest.skip(f"no package index answers: {asked.stderr.strip().splitlines()[-1]}")
    return found
