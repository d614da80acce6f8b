"""Tests of the vLLM backend on the real engine: `make test-vllm` installs it, and they are skipped where it is not."""

import pytest

from tests.inference.conftest import Backend, pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]


@pytest.fixture(scope="session")
def python() -> str | None:
    """The interpreter that has vLLM; None where it is this one."""
    return Backend("vllm").python
