"""Bodies that no client of the SDK sends: each is refused in words, and the server goes on."""

import json
from typing import Any

import numpy as np
import pytest

from meshrl.errors import DataError
from meshrl.tinker.requests import pass_of_wire
from meshrl.tinker.wire import packed
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


def field(model: bytes = b"m", number: int = 1, **tensor: bytes) -> bytes:
    """A pass with one row, of which a tensor has these fields."""
    inner = b"".join(tensor.values())
    row = packed(2, packed(1, "weights") + packed(2, inner))
    return packed(1, model) + packed(2, number) + packed(3, row)


def sparse(rows: list[int], columns: list[int], width: int) -> bytes:
    parts = packed(1, np.ones(len(columns), np.float32).tobytes())
    parts += packed(2, np.array(rows).tobytes()) + packed(3, np.array(columns).tobytes())
    return packed(2, parts) + packed(4, len(rows) - 1) + packed(4, width)


def test_a_sparse_tensor_has_no_more_bytes_than_a_body_may() -> None:
    found = pass_of_wire(field(sparse=sparse([0, 1, 3], [2, 0, 1], 3))).data[0].inputs["weights"]
    assert found.array.tolist() == [[0, 0, 1], [1, 1, 0]]
    for width in (1 << 26, 1 << 30):
        with pytest.raises(DataError, match="once it is whole"):
            pass_of_wire(field(sparse=sparse([0, 0], [], width)))
    two = packed(3, packed(2, packed(1, "weights") + packed(2, sparse([0, 0], [], 1 << 23))))
    with pytest.raises(DataError, match="0 of 67108864 are left"):
        pass_of_wire(two * 3)
