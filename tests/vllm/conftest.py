"""Tests of the vLLM backend on the real engine: `make test-vllm` installs it, and they are skipped where it is not."""

from tests.inference.conftest import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]
