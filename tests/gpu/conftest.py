"""Tests that need a GPU: `make test-gpu` runs them; every other run skips them, on whatever machine."""

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = str(config.getoption("markexpr")).startswith("gpu")
    reason = "there is no GPU" if asked else "`make test-gpu` runs it"
    for item in items:
        if item.get_closest_marker("gpu") and not (asked and torch.cuda.is_available()):
            item.add_marker(pytest.mark.skip(reason))
