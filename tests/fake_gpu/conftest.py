"""Tests on GPUs that are fake (`make fake-cuda`): `make test-fake-gpu` runs them, and each other run skips them."""

import sys

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "tests.support.fake_cuda.start" not in sys.modules:
        for item in items:
            if "fake_gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip("`make test-fake-gpu` runs it"))
