"""What a client of ours does when an answer is cut off, a result is gone, or a request is not taken."""

import json
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import meshrl as rl
from meshrl.errors import DataError
from meshrl.remote import Call, Made, Packed
from meshrl.remote.client import Client
from meshrl.remote.handles import Remote, RemotePolicy


class Answer(NamedTuple):
    status: int
    body: bytes
    kind: str = "application/json"
    cut: int = 0
    """Bytes that are announced and do not come."""


@contextmanager
def answering(answers: Sequence[Answer]) -> Generator[tuple[Remote, list[tuple[str, bytes]]]]:
    """Give these answers, one after the other. Yields a server's client, and the requests that come."""
    asked: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = answers[len(asked)]
            asked.append((self.path.rpartition("/")[2], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body) + answer.cut))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Nothing is told of it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Remote(Client(f"http://127.0.0.1:{server.server_port}", "tml-a", 60.0), "session", "tiny"), asked
        finally:
            server.shutdown()
            thread.join()


def named(name: str) -> Answer:
    return Answer(200, json.dumps({"request_id": name}).encode())


def made(**columns: rl.Ragged | NDArray[np.int64]) -> Answer:
    return Answer(200, msgspec.msgpack.encode(Made(Packed.of(rl.Batch.of(**columns)))), "application/msgpack")


async def test_rows_that_a_server_has_lost_are_drawn_again_and_a_cut_answer_is_asked_for_again() -> None:
    gone = Answer(410, b'{"error": "there is no request"}')
    rows = made(tokens=rl.Ragged.of([[1, 2]], np.int32), asked_row=np.arange(1))
    cut = Answer(200, rows.body[:-5], rows.kind, cut=5)
    with answering([named("a"), gone, named("a"), cut, rows]) as (server, asked):
        drawn = await rl.rollout(server.sampler(), rl.Batch.of(prompt=["ab>"]), rl.Sampling(max_tokens=2))
    assert drawn.tokens.values.tolist() == [1, 2]
    assert [path for path, _ in asked] == ["generate", "retrieve_future"] * 2 + ["retrieve_future"]
    assert asked[0] == asked[2]


async def test_a_call_that_a_server_does_not_take_holds_no_later_ones_back() -> None:
    batch = rl.Batch.of(tokens=rl.Ragged.of([[1, 2]], np.int32))
    told = made(logprobs=rl.Ragged.of([[0, 1]], np.float32))
    large = Answer(413, b'{"error": "the body has more than 1 MiB"}')
    with answering([large, named("filler"), named("second"), told]) as (server, asked):
        policy = RemotePolicy(server, "model")
        with pytest.raises(DataError, match="more than 1 MiB"):
            await policy.logprobs(batch)
        assert (await policy.logprobs(batch)).ragged("logprobs").values.tolist() == [0, 1]
    calls = [msgspec.msgpack.decode(body, type=Call) for path, body in asked if path == "call"]
    assert [(call.seq_id, call.batch is not None) for call in calls] == [(1, True), (1, False), (2, True)]
