"""Bodies that no client of the SDK sends: each is refused in words, and the server goes on."""

import json
from typing import Any

import pytest

from tests.tinker.test_sdk import post

CHUNKS = {"chunks": [{"tokens": [1, 5, 3]}]}


@pytest.fixture(scope="module")
def session(url: str) -> str:
    return str(post(url, "create_session", b"{}")[1]["session_id"])


def sample(url: str, **given: Any) -> tuple[int, Any]:
    body = {"prompt": CHUNKS, "sampling_params": {"max_tokens": 4}, **given}
    return post(url, "asample", json.dumps(body).encode())


def test_a_request_for_too_many_samples_is_refused(url: str) -> None:
    status, told = sample(url, base_model="tiny", num_samples=1_000_000_000)
    assert (status, "<= 1024" in told["error"]) == (400, True)
