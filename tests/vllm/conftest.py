"""Tests of the vLLM backend on the real engine: `make test-vllm` installs it, and they are skipped where it is not."""

from importlib.util import find_spec
from pathlib import Path

import pytest

OWN = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
"""Of the environment that `make test-vllm` makes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm") and not OWN.exists() and find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip("vLLM is not installed: `make test-vllm`"))


@pytest.fixture(scope="session")
def python() -> str | None:
    """The interpreter that has vLLM; None where it is this one."""
    return str(OWN) if OWN.exists() else None
