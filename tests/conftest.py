"""What holds for every test."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import settings

# How long one example takes says more of the machine's load than of the code; each test has a time limit as a whole.
settings.register_profile("meshrl", deadline=None)
settings.load_profile("meshrl")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One cluster of this machine for all tests: starting one takes seconds."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed")
    import ray  # noqa: PLC0415 -- an extra, and slow to import

    ray.init("local", num_cpus=2, resources={"shelf": 2}, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
