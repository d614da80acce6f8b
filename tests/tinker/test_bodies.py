"""Bodies that no client of the SDK sends: each is refused in words, and the server goes on."""

import json
from typing import Any

import numpy as np
import pytest
import zstandard

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


def test_a_tensor_that_cannot_be_kept_is_refused() -> None:
    cases = {
        "2147483648": packed(4, 1 << 31),
        "where an integer belongs": packed(4, 1.5),
        "no whole number of int64": packed(2, packed(2, b"abc")) + packed(4, 1),
    }
    for said, tensor in cases.items():
        with pytest.raises(DataError, match=said):
            pass_of_wire(field(tensor=tensor))


def test_a_compressed_body_is_one_whole_frame(url: str) -> None:
    body = zstandard.ZstdCompressor().compress(json.dumps({"tags": ["a" * 100]}).encode())
    cases = {"": body, "ends after": body[:-4], "1 bytes follow": body + b"x"}
    for said, sent in cases.items():
        status, told = post(url, "create_session", sent, Content_Encoding="zstd")
        assert (status, said in told.get("error", "")) == (400 if said else 200, True)


def test_a_sample_is_of_what_is_served_and_each_number_is_one_request(url: str, session: str) -> None:
    status, told = sample(url, base_model="gpt-5")
    assert (status, "no model 'gpt-5'" in told["error"]) == (400, True)
    new = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = post(url, "create_sampling_session", json.dumps(new).encode())[1]["sampling_session_id"]
    named = [sample(url, sampling_session_id=sampler)[1]["request_id"] for _ in range(2)]
    assert len(set(named)) == 2
    numbered = [sample(url, sampling_session_id=sampler, seq_id=1, num_samples=each) for each in (1, 1, 2)]
    assert [status for status, _ in numbered] == [200, 200, 400]


def test_a_load_that_cannot_be_read_takes_its_number(url: str, session: str) -> None:
    new = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    assert post(url, "create_model", json.dumps({**new, "lora_config": {"rank": 1 << 20}}).encode())[0] == 400
    name = post(url, "create_model", json.dumps(new).encode())[1]["model_id"]
    load = json.dumps({"model_id": name, "seq_id": 1, "path": 5, "optimizer": True}).encode()
    status, told = post(url, "load_weights", load)
    assert (status, told["request_id"]) == (200, f"{name}:1")
    failed = post(url, "retrieve_future", json.dumps({"request_id": told["request_id"]}).encode())[1]
    assert failed["category"] == "user"
    lost = json.dumps({"model_id": name, "seq_id": 3_000_000_000, "adam_params": "x"}).encode()
    assert post(url, "optim_step", lost)[0] == 400
