"""Bodies that no client of the SDK sends: each is refused in words, and the server goes on."""

import json
from typing import Any

import numpy as np
import pytest
import zstandard
from tinker.proto.tinker_public_pb2 import DTYPE_BFLOAT16, DTYPE_INT64, ForwardBackwardRequest, Tensor

from meshrl.errors import DataError
from meshrl.tinker.requests import pass_of_wire
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


def made(*tensors: Tensor) -> bytes:
    """A pass with a row for each of these tensors."""
    request = ForwardBackwardRequest(model_id="m", seq_id=1)
    for tensor in tensors:
        request.data.add().loss_fn_inputs["weights"].CopyFrom(tensor)
    return bytes(request.SerializeToString())


def sparse(rows: list[int], columns: list[int], width: int) -> Tensor:
    tensor = Tensor(shape=[len(rows) - 1, width])
    tensor.sparse_csr.values = np.ones(len(columns), np.float32).tobytes()
    tensor.sparse_csr.crow_indices = np.array(rows).tobytes()
    tensor.sparse_csr.col_indices = np.array(columns).tobytes()
    return tensor


def test_a_sparse_tensor_has_no_more_bytes_than_a_body_may() -> None:
    found = pass_of_wire(made(sparse([0, 1, 3], [2, 0, 1], 3))).data[0].inputs["weights"]
    assert found.array.tolist() == [[0, 0, 1], [1, 1, 0]]
    for width in (1 << 26, 1 << 30):
        with pytest.raises(DataError, match="once it is whole"):
            pass_of_wire(made(sparse([0, 0], [], width)))
    with pytest.raises(DataError, match="0 of 67108864 are left"):
        pass_of_wire(made(*[sparse([0, 0], [], 1 << 23)] * 3))


def test_a_pass_that_cannot_be_kept_is_refused() -> None:
    torn = Tensor(shape=[1])
    torn.sparse_csr.crow_indices = b"abc"
    cases = {
        "2147483648": made(Tensor(shape=[1 << 31])),
        "no whole number of int64": made(torn),
        "dtype number 4": made(Tensor(dtype=DTYPE_BFLOAT16)),
        "not a whole protocol buffer": made(Tensor(shape=[1], dtype=DTYPE_INT64))[:-1],
    }
    for said, body in cases.items():
        with pytest.raises(DataError, match=said):
            pass_of_wire(body)


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
